#include "zero/pages/buffer_sync.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>

#include "memory/absent_storage.h"
#include "memory/storage.h"
#include "operators/operator_interceptor.h"
#include "optim/bit_hashes.h"
#include "zero/pages/value_hash.h"
#include "zeropage/event_sink.h"
#include "zeropage/ledger.h"

namespace zeropage::zero {
namespace {

// Larger buffers are sampled, each line of the cache once in so many rounds.
constexpr size_t kComparedWhole = 64 * 1024;
constexpr uint64_t kRounds = 64;

// Whether its bytes can be looked at.
bool has_bytes_here(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.is_non_overlapping_and_dense();
}

// Its elements as they lie.
at::Tensor flat_of(const at::Tensor& dense) {
  return dense.detach().as_strided({dense.numel()}, {1});
}

// Another model that has it too may be parked.
bool has_memory(const at::Tensor& tensor) {
  return tensor.has_storage() && !memory::is_absent(*tensor.storage().unsafeGetStorageImpl());
}

uint64_t hash_of_round(const at::Tensor& tensor, uint64_t round) {
  const void* const bytes = tensor.const_data_ptr();
  const auto count = static_cast<size_t>(tensor.nbytes());
  return count <= kComparedWhole ? hash_of_bytes(bytes, count) : sampled_hash(bytes, count, round);
}

}  // namespace

BufferSync::BufferSync(comm::World world,
                       const std::vector<std::pair<std::string, at::Tensor>>& buffers)
    : world_(std::move(world)),
      of_model_(world_.modules() > 1 ? c10::str(" of model ", world_.modules()) : "") {
  for (const auto& [name, tensor] : buffers) buffers_.push_back({.name = name, .tensor = tensor});
}

// Inference tensors have no version.
bool BufferSync::is_always_sent(const at::Tensor& tensor) {
  return (tensor.is_floating_point() && tensor.dim() <= 1) || tensor.is_inference();
}

bool BufferSync::has_trace_of_write(const Buffer& buffer) {
  const at::Tensor& tensor = buffer.tensor;
  return tensor._version() != buffer.version || tensor.const_data_ptr() != buffer.address;
}

bool BufferSync::is_written(const Buffer& buffer) const {
  const at::Tensor& tensor = buffer.tensor;
  if (is_always_sent(tensor) || has_trace_of_write(buffer)) return true;
  if (buffer.hashes.empty() || !has_bytes_here(tensor)) return false;
  const uint64_t round = round_ % buffer.hashes.size();
  return hash_of_round(tensor, round) != buffer.hashes[round];
}

void BufferSync::note_sent(Buffer& buffer) {
  const at::Tensor& tensor = buffer.tensor;
  if (is_always_sent(tensor)) return;
  buffer.version = tensor._version();
  buffer.address = tensor.const_data_ptr();
  buffer.hashes.clear();
  if (!has_bytes_here(tensor)) return;
  buffer.hashes.resize(tensor.nbytes() <= kComparedWhole ? 1 : kRounds);
  for (uint64_t round = 0; round < buffer.hashes.size(); ++round) {
    buffer.hashes[round] = hash_of_round(tensor, round);
  }
}

bool BufferSync::is_compared(const Buffer& buffer) {
  return !is_always_sent(buffer.tensor) && buffer.tensor.is_non_overlapping_and_dense() &&
         buffer.tensor.numel() > 0 && !has_trace_of_write(buffer);
}

void BufferSync::begin_move() {
  for (Buffer& buffer : buffers_) {
    buffer.is_where_it_was =
        has_memory(buffer.tensor) && buffer.tensor.const_data_ptr() == buffer.address;
  }
}

void BufferSync::end_move() {
  for (Buffer& buffer : buffers_) {
    if (!buffer.is_where_it_was || !has_memory(buffer.tensor)) continue;
    buffer.address = buffer.tensor.const_data_ptr();
  }
}

uint64_t BufferSync::hash_unwritten() const {
  std::vector<at::Tensor> flat;
  for (const Buffer& buffer : buffers_) {
    if (is_compared(buffer)) flat.push_back(flat_of(buffer.tensor));
  }
  const std::vector<uint64_t> hashes = optim::bit_hashes(flat);
  return hash_of_bytes(hashes.data(), hashes.size() * sizeof(uint64_t));
}

void BufferSync::describe_unwritten(const std::string& where, const TellValues& tell) const {
  for (const Buffer& buffer : buffers_) {
    if (!is_compared(buffer)) continue;
    tell("values of buffer \"" + buffer.name + "\"" + where,
         words_of_values(flat_of(buffer.tensor)));
  }
}

void BufferSync::tell_written(uint8_t* written) {
  ++round_;
  for (const Buffer& buffer : buffers_) *written++ = is_written(buffer) ? 1 : 0;
}

void BufferSync::broadcast_alike(const std::vector<Buffer*>& alike) const {
  const memory::KindScope kind(memory::Kind::kStaging);
  std::vector<at::Tensor> flattened;
  for (const Buffer* const buffer : alike) flattened.push_back(buffer->tensor.reshape({-1}));
  const at::Tensor together = at::cat(flattened);
  const memory::OwnerScope owner("the module's buffers");
  world_.communicator().broadcast(together, /*root=*/0, "the module's buffers" + of_model_).wait();
  if (world_.rank() == 0) return;
  int64_t offset = 0;
  for (const Buffer* const buffer : alike) {
    const at::Tensor& tensor = buffer->tensor;
    // Not tensor.copy_(): a backward that is to come would take it for a change of what it needs.
    memory::write_values(tensor.variable_data(),
                         together.narrow(0, offset, tensor.numel()).view(tensor.sizes()),
                         "buffer \"" + buffer->name + "\"");
    offset += tensor.numel();
  }
}

void BufferSync::broadcast_from_rank_zero(const uint8_t* written) {
  if (world_.size() == 1) return;
  const at::NoGradGuard no_grad;
  // Rank 0 writes nothing here, and whoever records a forward must see the same one on all ranks.
  const operators::InterceptorScope unseen(nullptr);
  std::vector<std::vector<Buffer*>> of_kinds;  // alike in dtype and device
  for (Buffer& buffer : buffers_) {
    if (*written++ == 0) continue;
    const auto alike = std::find_if(of_kinds.begin(), of_kinds.end(), [&](const auto& of_kind) {
      const at::Tensor& first = of_kind.front()->tensor;
      return first.scalar_type() == buffer.tensor.scalar_type() &&
             first.device() == buffer.tensor.device();
    });
    if (alike != of_kinds.end()) {
      alike->push_back(&buffer);
    } else {
      of_kinds.push_back({&buffer});
    }
  }
  for (const std::vector<Buffer*>& alike : of_kinds) {
    broadcast_alike(alike);
    for (Buffer* const buffer : alike) note_sent(*buffer);
  }
}

void BufferSync::broadcast_all_from_rank_zero() {
  const std::vector<uint8_t> all(buffers_.size(), 1);
  broadcast_from_rank_zero(all.data());
}

void BufferSync::broadcast_written_from_rank_zero() {
  if (world_.size() == 1 || buffers_.empty()) return;
  const operators::InterceptorScope unseen(nullptr);
  const at::Tensor written = at::zeros({static_cast<int64_t>(count())}, at::kByte);
  tell_written(written.mutable_data_ptr<uint8_t>());
  world_.communicator()
      .all_reduce(written, comm::ReduceOp::kMax,
                  "which of the module's buffers were written" + of_model_)
      .wait();
  broadcast_from_rank_zero(written.const_data_ptr<uint8_t>());
}

}  // namespace zeropage::zero
