#include "offload/detail/wrapped_disk.h"

#include <map>
#include <mutex>
#include <utility>

#include <c10/util/Exception.h>

namespace zeropage::offload::detail {
namespace {

struct Wraps {
  std::mutex mutex;
  std::map<std::string, WrappedDisk::Wrap> by_folder;  // guarded by mutex
};

// A file is made at its first use, on whatever thread that is; so by folder, not by thread.
Wraps& wraps() {
  static Wraps wraps;
  return wraps;
}

}  // namespace

WrappedDisk::WrappedDisk(std::string folder, Wrap wrap) : folder_(std::move(folder)) {
  const std::lock_guard lock(wraps().mutex);
  const bool is_first = wraps().by_folder.emplace(folder_, std::move(wrap)).second;
  TORCH_CHECK(is_first, "WrappedDisk of ", folder_, ": expected one at a time, got a second");
}

WrappedDisk::~WrappedDisk() {
  const std::lock_guard lock(wraps().mutex);
  wraps().by_folder.erase(folder_);
}

std::unique_ptr<BlockDevice> WrappedDisk::in_place_of(std::unique_ptr<BlockDevice> disk,
                                                      const std::string& folder) {
  Wrap wrap;
  {
    const std::lock_guard lock(wraps().mutex);
    const auto at = wraps().by_folder.find(folder);
    if (at != wraps().by_folder.end()) wrap = at->second;
  }
  return wrap ? wrap(std::move(disk)) : std::move(disk);
}

}  // namespace zeropage::offload::detail
