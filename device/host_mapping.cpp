#include "device/host_mapping.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <stdexcept>
#include <string>
#include <sys/mman.h>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <vector>

#include "zeropage/bytes.h"

namespace zeropage::device {
namespace {

using memory::operator""_MiB;

constexpr int64_t kHugePageBytes = 2_MiB;

void touch(std::byte* begin, std::byte* end) {
  for (std::byte* page = begin; page < end; page += memory::system_page_bytes()) {
    *static_cast<volatile std::byte*>(page) = std::byte{0};
  }
}

}  // namespace

HostMapping::HostMapping(int64_t bytes, const HostMappingOptions& options) {
  if (bytes < 1) {
    throw std::invalid_argument("host mapping: expected 1 byte or more, got " +
                                std::to_string(bytes));
  }
  bytes_ = (bytes + memory::system_page_bytes() - 1) / memory::system_page_bytes() *
           memory::system_page_bytes();
  void* const mapped = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, /*fd=*/-1, 0);
  if (mapped == MAP_FAILED) {
    throw std::system_error(
        errno, std::generic_category(),
        "the system does not map " + memory::format_bytes(bytes_) + " on the host");
  }
  data_ = static_cast<std::byte*>(mapped);
  // Either is advice; a kernel that does not know it has small pages.
  madvise(mapped, static_cast<size_t>(bytes_),
          options.huge_pages == HugePages::kAsk ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  try {
    if (options.cores.empty()) {
      touch(data_, data_ + bytes_);
    } else {
      touch_from(options.cores);
    }
  } catch (...) {
    munmap(data_, static_cast<size_t>(bytes_));
    throw;
  }
}

HostMapping::~HostMapping() {
  munmap(data_, static_cast<size_t>(bytes_));
}

void HostMapping::touch_from(const CoreSet& cores) const {
  const auto count = static_cast<int64_t>(cores.size());
  // At a huge page's beginning, so that none is shared by two threads.
  const auto begin_of = [&](int64_t part) {
    const auto base = reinterpret_cast<intptr_t>(data_);
    const int64_t wanted = base + bytes_ / count * part;
    const int64_t aligned = (wanted + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes - base;
    return part == 0 ? 0 : part == count ? bytes_ : std::min(bytes_, aligned);
  };
  std::vector<std::exception_ptr> errors(cores.size());
  {
    std::vector<std::jthread> threads;
    for (int64_t part = 0; part < count; ++part) {
      threads.emplace_back([&, part] {
        const auto index = static_cast<size_t>(part);
        try {
          bind_this_thread({cores[index]});
          touch(data_ + begin_of(part), data_ + begin_of(part + 1));
        } catch (...) {
          errors[index] = std::current_exception();
        }
      });
    }
  }
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace zeropage::device
