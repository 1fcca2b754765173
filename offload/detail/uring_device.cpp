#include <cerrno>
#include <cstring>
#include <liburing.h>
#include <utility>

#include <c10/util/StringUtil.h>

#include "offload/detail/block_device.h"
#include "zeropage/check.h"

namespace zeropage::offload::detail {
namespace {

class UringDevice : public BlockDevice {
 public:
  UringDevice(int descriptor, int depth) : descriptor_(descriptor), depth_(depth) {}
  ~UringDevice() override {
    if (is_open_) io_uring_queue_exit(&ring_);
  }
  UringDevice(const UringDevice&) = delete;
  UringDevice& operator=(const UringDevice&) = delete;

  // "" if the kernel takes reads and writes by it, else why not.
  std::string open() {
    const int error = io_uring_queue_init(static_cast<unsigned>(depth_), &ring_, 0);
    if (error < 0) return c10::str("io_uring_setup: ", std::strerror(-error));
    is_open_ = true;
    const std::unique_ptr<io_uring_probe, void (*)(io_uring_probe*)> probe(
        io_uring_get_probe_ring(&ring_), io_uring_free_probe);
    if (!probe || io_uring_opcode_supported(probe.get(), IORING_OP_READ) == 0 ||
        io_uring_opcode_supported(probe.get(), IORING_OP_WRITE) == 0) {
      return "this kernel's io_uring has no read and write (Linux 5.6 or newer has)";
    }
    return "";
  }

  int depth() const override { return depth_; }

  void submit(const Transfer& transfer) override {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    TORCH_INTERNAL_ASSERT(entry != nullptr, "more transfers in flight than the ring has places");
    const auto bytes = static_cast<unsigned>(transfer.bytes);
    const auto offset = static_cast<uint64_t>(transfer.offset);
    if (transfer.direction == Direction::kRead) {
      io_uring_prep_read(entry, descriptor_, transfer.data, bytes, offset);
    } else {
      io_uring_prep_write(entry, descriptor_, transfer.data, bytes, offset);
    }
    entry->user_data = transfer.tag;
    // What the kernel does not take now goes with the next call.
    check(io_uring_submit(&ring_), "io_uring_submit");
  }

  Completion wait() override {
    io_uring_cqe* entry = nullptr;
    while (io_uring_peek_cqe(&ring_, &entry) != 0) {
      check(io_uring_submit_and_wait(&ring_, 1), "io_uring_submit_and_wait");
    }
    const Completion completion{static_cast<size_t>(entry->user_data), entry->res};
    io_uring_cqe_seen(&ring_, entry);
    return completion;
  }

  std::string describe() const override { return "io_uring"; }

 private:
  static void check(int result, const char* call) {
    const bool later = result == -EINTR || result == -EAGAIN || result == -EBUSY;
    ZP_CHECK(result >= 0 || later, call, ": ", std::strerror(-result));
  }

  const int descriptor_;
  const int depth_;
  io_uring ring_{};
  bool is_open_ = false;
};

}  // namespace

std::unique_ptr<BlockDevice> make_uring_device(int descriptor, int depth, std::string& refusal) {
  auto device = std::make_unique<UringDevice>(descriptor, depth);
  refusal = device->open();
  if (!refusal.empty()) return nullptr;
  return device;
}

}  // namespace zeropage::offload::detail
