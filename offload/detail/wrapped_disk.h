// For tests: another device in place of a disk, such as one that errs.
//
//   const detail::WrappedDisk wrapped(folder, [](std::unique_ptr<BlockDevice> disk) {
//     return std::make_unique<FaultyDevice>(std::move(disk));
//   });
//
// Files of records that are made in `folder` while it lives move their bytes by what `wrap` returns.
// Threads: any; `wrap` is called by the thread that makes a file. One at a time for a folder.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "offload/detail/block_device.h"

namespace zeropage::offload::detail {

class WrappedDisk {
 public:
  using Wrap = std::function<std::unique_ptr<BlockDevice>(std::unique_ptr<BlockDevice> disk)>;

  // folder: as the options of the files name it.
  WrappedDisk(std::string folder, Wrap wrap);
  ~WrappedDisk();
  WrappedDisk(const WrappedDisk&) = delete;
  WrappedDisk& operator=(const WrappedDisk&) = delete;

  // The device of a file in that folder.
  static std::unique_ptr<BlockDevice> in_place_of(std::unique_ptr<BlockDevice> disk,
                                                  const std::string& folder);

 private:
  const std::string folder_;
};

}  // namespace zeropage::offload::detail
