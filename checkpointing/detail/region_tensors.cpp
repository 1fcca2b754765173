#include "checkpointing/detail/region_tensors.h"

#include <cstring>

#include "zeropage/check.h"

namespace zeropage::checkpointing::detail {
namespace {

// FNV-1a over 64-bit words of the values, in the tensor's own order of elements; 0 for bytes, which
// are work space of kernels.
uint64_t hash_of(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::kByte) return 0;
  const at::Tensor values = tensor.detach().contiguous().cpu();
  constexpr uint64_t kPrime = 0x100000001b3;
  uint64_t hash = 0xcbf29ce484222325;
  const auto* bytes = static_cast<const unsigned char*>(values.const_data_ptr());
  size_t left = values.nbytes();
  for (; left >= sizeof(uint64_t); left -= sizeof(uint64_t), bytes += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes, sizeof(word));
    hash = (hash ^ word) * kPrime;
  }
  for (; left > 0; --left, ++bytes) hash = (hash ^ *bytes) * kPrime;
  return hash;
}

std::string describe(at::ScalarType dtype, at::IntArrayRef sizes, c10::Device device) {
  return c10::str(dtype, " ", sizes, " on ", device);
}

}  // namespace

size_t RegionTensors::add(const at::Tensor& tensor, bool has_values) {
  tensors_.push_back(
      {.sizes = tensor.sizes().vec(), .dtype = tensor.scalar_type(), .device = tensor.device()});
  if (options_.check_values && has_values) tensors_.back().hash = hash_of(tensor);
  return tensors_.size() - 1;
}

void RegionTensors::forget(size_t index) {
  tensors_[index].wanted = false;
  tensors_[index].recomputed.reset();
}

void RegionTensors::drop_recomputed() {
  for (Saved& saved : tensors_) saved.recomputed.reset();
}

bool RegionTensors::compare_and_keep(size_t index, const at::Tensor& tensor) {
  const auto other_forward =
      "; a repetition must run the same operators on the same values: give the region what its "
      "function depends on as arguments, and let operators draw its random numbers";
  ZP_CHECK(index < tensors_.size(), who_,
           ": the repetition saves more tensors than the first run, ", tensors_.size(),
           ": the next is ", describe(tensor.scalar_type(), tensor.sizes(), tensor.device()),
           other_forward);
  Saved& saved = tensors_[index];
  if (options_.check_geometry) {
    const bool same = saved.sizes == tensor.sizes() && saved.dtype == tensor.scalar_type() &&
                      saved.device == tensor.device();
    ZP_CHECK(same, who_, ": saved tensor ", index, " of ", tensors_.size(),
             " differs in the repetition: expected ",
             describe(saved.dtype, saved.sizes, saved.device), ", got ",
             describe(tensor.scalar_type(), tensor.sizes(), tensor.device()), other_forward);
  }
  ZP_CHECK(!saved.hash || hash_of(tensor) == *saved.hash, who_, ": saved tensor ", index, " of ",
           tensors_.size(), ", ", describe(saved.dtype, saved.sizes, saved.device),
           ", has other values in the repetition", other_forward);
  if (saved.wanted) saved.recomputed = tensor.detach();
  for (size_t later = index + 1; later < tensors_.size(); ++later) {
    if (tensors_[later].wanted) return false;
  }
  return true;
}

}  // namespace zeropage::checkpointing::detail
