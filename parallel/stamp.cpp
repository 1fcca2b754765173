#include "parallel/stamp.h"

#include <functional>

#include <ATen/ATen.h>

#include "zeropage/check.h"

namespace zeropage::parallel {

Stamp::Stamp(const std::string& name)
    : name_(name), hash_(static_cast<int64_t>(std::hash<std::string>()(name))) {}

int64_t Stamp::numel(at::ScalarType dtype) {
  return static_cast<int64_t>(sizeof(int64_t) / c10::elementSize(dtype));
}

void Stamp::put(const at::Tensor& message) const {
  const int64_t own = numel(message.scalar_type());
  message.narrow(-1, message.size(-1) - own, own)
      .copy_(at::full({1}, hash_, message.options().dtype(at::kLong)).view(message.scalar_type()));
}

void Stamp::note(const at::Tensor& message, int from_rank) {
  const int64_t own = numel(message.scalar_type());
  noted_.push_back(
      message.narrow(-1, message.size(-1) - own, own).clone().view(-1).view(at::kLong));
  ranks_.push_back(from_rank);
}

void Stamp::check(const comm::World& world, const char* differs) const {
  // In a simulated world there are no values.
  if (noted_.empty() || noted_.front().is_meta()) return;
  const at::Tensor all = at::cat(noted_).cpu();
  for (size_t index = 0; index < ranks_.size(); ++index) {
    ZP_CHECK(all.const_data_ptr<int64_t>()[index] == hash_, name_, ": rank ",
             world.global_rank(ranks_[index]), " ", differs);
  }
}

}  // namespace zeropage::parallel
