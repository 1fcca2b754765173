#include "optim/quantised_states.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "optim/cpu/quantised_loops.h"
#include "zeropage/detail/state_format.h"

namespace zeropage::optim {
namespace {

// Calls visit(block, first, numel) for the parts of blocks that the elements are.
template <typename Visit>
void for_each_block(int64_t numel, int64_t first_in_block, Visit visit) {
  int64_t begin = 0;
  for (int64_t block = 0; begin < numel; ++block) {
    const int64_t room = kStateBlockNumel - (block == 0 ? first_in_block : 0);
    const int64_t here = std::min(room, numel - begin);
    visit(block, begin, here);
    begin += here;
  }
}

}  // namespace

at::Tensor dequantised_state(StateSign sign, const at::Tensor& codes, const at::Tensor& scales,
                             int64_t first_in_block) {
  const at::Tensor host_codes = codes.cpu();
  const at::Tensor host_scales = scales.cpu();
  const at::Tensor values = at::empty({codes.numel()}, at::kFloat);
  const optim::cpu::QuantisedLoops& loops = optim::cpu::quantised_loops();
  for_each_block(codes.numel(), first_in_block, [&](int64_t block, int64_t begin, int64_t numel) {
    loops.dequantise(sign, host_codes.const_data_ptr<uint8_t>() + begin,
                     host_scales.const_data_ptr<float>()[block],
                     values.mutable_data_ptr<float>() + begin, numel);
  });
  return values;
}

void quantise_state(StateSign sign, const at::Tensor& values, int64_t first_in_block,
                    const at::Tensor& codes, const at::Tensor& scales) {
  const at::Tensor host_codes = codes.is_cpu() ? codes : at::empty_like(codes, at::kCPU);
  const at::Tensor host_scales = scales.is_cpu() ? scales : at::empty_like(scales, at::kCPU);
  const optim::cpu::QuantisedLoops& loops = optim::cpu::quantised_loops();
  for_each_block(codes.numel(), first_in_block, [&](int64_t block, int64_t begin, int64_t numel) {
    host_scales.mutable_data_ptr<float>()[block] =
        loops.quantise(sign, values.const_data_ptr<float>() + begin,
                       host_codes.mutable_data_ptr<uint8_t>() + begin, numel);
  });
  if (codes.is_cpu()) return;
  at::Tensor(codes).copy_(host_codes);
  at::Tensor(scales).copy_(host_scales);
}

}  // namespace zeropage::optim
