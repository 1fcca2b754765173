#include "device/page_locked.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "device/detail/page_locked_block.h"

namespace zeropage::device {
namespace {

struct KnownBlock {
  const std::byte* end;
  std::vector<Stream> used_by;
};

// The memory of a block that has ended, and what it waits for.
struct EndedBlock {
  std::vector<Event> uses;
  std::shared_ptr<const void> holder;

  // A device that failed does not tell: whoever computes on it gets its error.
  bool is_free() const noexcept {
    try {
      return std::all_of(uses.begin(), uses.end(), [](const Event& use) { return use.passed(); });
    } catch (const std::exception&) {
      return false;
    }
  }
};

struct PageLockedBlocks {
  std::mutex mutex;
  // Guarded by mutex.
  std::map<const std::byte*, KnownBlock, std::less<>> known;  // by the first byte
  std::deque<EndedBlock> ended;                               // the first one first
  // Their device failed, so nobody knows when their copies end: they stay.
  std::deque<EndedBlock> lost;
};

// Never destroyed: tensors of static storage duration end after us.
PageLockedBlocks& page_locked_blocks() {
  static auto* const blocks = new PageLockedBlocks;
  return *blocks;
}

// Lets go of ended blocks that nothing uses any more, up to the first that something does: hundreds may wait, and each question costs
// the driver's answer.
void let_go_of_ended() {
  std::vector<EndedBlock> free;  // let go outside of the lock
  const std::lock_guard lock(page_locked_blocks().mutex);
  std::deque<EndedBlock>& ended = page_locked_blocks().ended;
  while (!ended.empty() && ended.front().is_free()) {
    free.push_back(std::move(ended.front()));
    ended.pop_front();
  }
}

int64_t past_multiple(const void* data, int64_t alignment) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) %
                              static_cast<uintptr_t>(alignment));
}

}  // namespace

PageLockedBlock::PageLockedBlock(const void* data, int64_t bytes,
                                 std::shared_ptr<const void> holder)
    : data_(data), holder_(std::move(holder)) {
  let_go_of_ended();
  const auto* const begin = static_cast<const std::byte*>(data);
  const std::lock_guard lock(page_locked_blocks().mutex);
  page_locked_blocks().known[begin] = {begin + bytes, {}};
}

std::unique_ptr<PageLockedBlock> PageLockedBlock::from_cache(int64_t bytes, c10::DeviceType device,
                                                             int64_t alignment) {
  // Before the cache is asked: it may get back what it is to give.
  let_go_of_ended();
  const auto take = [&](int64_t some) {
    return std::make_shared<const c10::DataPtr>(
        at::globalContext().getPinnedMemoryAllocator(device)->allocate(static_cast<size_t>(some)));
  };
  auto memory = take(bytes);
  // Mostly it is aligned. One byte more than a power of two would take twice the memory.
  if (past_multiple(memory->get(), alignment) != 0) memory = take(bytes + alignment);
  const int64_t past = past_multiple(memory->get(), alignment);
  const auto* const data =
      static_cast<const std::byte*>(memory->get()) + (past == 0 ? 0 : alignment - past);
  return std::make_unique<PageLockedBlock>(data, bytes, std::move(memory));
}

PageLockedBlock::~PageLockedBlock() {
  KnownBlock block;
  {
    const std::lock_guard lock(page_locked_blocks().mutex);
    block = std::move(
        page_locked_blocks().known.extract(static_cast<const std::byte*>(data_)).mapped());
  }
  if (block.used_by.empty()) return;
  EndedBlock ended{{}, std::move(holder_)};
  bool is_known_when = true;
  try {
    for (const Stream& stream : block.used_by) ended.uses.push_back(stream.record());
  } catch (const std::exception&) {
    is_known_when = false;
  }
  {
    const std::lock_guard lock(page_locked_blocks().mutex);
    auto& list = is_known_when ? page_locked_blocks().ended : page_locked_blocks().lost;
    list.push_back(std::move(ended));
  }
  let_go_of_ended();
}

void PageLockedBlock::note_use(const void* data, const Stream& stream) {
  const auto* const address = static_cast<const std::byte*>(data);
  const std::lock_guard lock(page_locked_blocks().mutex);
  auto& known = page_locked_blocks().known;
  const auto after = known.upper_bound(address);
  if (after == known.begin()) return;
  KnownBlock& block = std::prev(after)->second;
  if (address >= block.end) return;
  const bool is_known =
      std::find(block.used_by.begin(), block.used_by.end(), stream) != block.used_by.end();
  if (!is_known) block.used_by.push_back(stream);
}

void PageLockedBlock::wait_for_ended() {
  std::deque<EndedBlock> ended;
  {
    const std::lock_guard lock(page_locked_blocks().mutex);
    ended = std::exchange(page_locked_blocks().ended, {});
  }
  for (EndedBlock& one : ended) {
    try {
      for (const Event& use : one.uses) use.synchronize();
    } catch (const std::exception&) {
      const std::lock_guard lock(page_locked_blocks().mutex);
      page_locked_blocks().lost.push_back(std::move(one));
    }
  }
}

at::Tensor page_locked(int64_t bytes, const PageLockedOptions& options) {
  if (bytes == 0) return at::empty({0}, at::kByte);
  std::shared_ptr<const PageLockedBlock> block =
      PageLockedBlock::from_cache(bytes, options.device.type(), options.alignment);
  void* const data = block->data();
  // Told its device, LibTorch does not ask the driver whose memory it is.
  return at::from_blob(
      data, {bytes}, [block = std::move(block), kept = options.kept](void* /*data*/) {}, at::kByte,
      c10::Device(c10::DeviceType::CPU));
}

void start_copy(const at::Tensor& to, const at::Tensor& from) {
  TORCH_INTERNAL_ASSERT(to.is_contiguous() && from.is_contiguous() && to.sizes() == from.sizes() &&
                        to.scalar_type() == from.scalar_type());
  const at::Tensor& on_host = to.is_cpu() ? to : from;
  const c10::Device device = to.is_cpu() ? from.device() : to.device();
  if (on_host.is_cpu() && has_streams(device.type())) {
    PageLockedBlock::note_use(on_host.const_data_ptr(), Stream::current(device));
  }
  at::Tensor(to).copy_(from, /*non_blocking=*/true);
}

ArrivingCopy start_copy_to_host(const at::Tensor& from) {
  const at::Tensor values =
      page_locked(static_cast<int64_t>(from.nbytes()), {.device = from.device()})
          .view(from.scalar_type())
          .view(from.sizes());
  start_copy(values, from.contiguous());
  return {values, Stream::current(from.device()).record()};
}

at::Tensor start_copy_to_device(const at::Tensor& from, c10::Device device) {
  if (!has_streams(device.type())) return from.to(device);
  const at::Tensor staged = page_locked(static_cast<int64_t>(from.nbytes()), {.device = device})
                                .view(from.scalar_type())
                                .view(from.sizes());
  staged.copy_(from);
  const at::Tensor there = at::empty(from.sizes(), from.options().device(device));
  start_copy(there, staged);
  return there;
}

}  // namespace zeropage::device
