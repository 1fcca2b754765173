#include "optim/adopt_copy.h"

#include <ATen/ops/where.h>

#include "optim/cpu/fused_step.h"
#include "optim/flat_tensor.h"
#include "optim/parallel.h"
#include "zeropage/check.h"

namespace zeropage::optim {
namespace {

constexpr const char* kAdoptCopy = "adopt_copy";

// The least that is worth a thread of its own.
constexpr int64_t kAdoptedNumelPerThread = 65536;

}  // namespace

void adopt_copy(const at::Tensor& values, const at::Tensor& copy) {
  check_fp32({kAdoptCopy, "values"}, values);
  const Precision precision = precision_of({kAdoptCopy, "copy"}, copy);
  if (values.is_meta() || values.numel() == 0) return;
  if (precision == Precision::kFloat) {
    values.copy_(copy);
    return;
  }
  if (!values.is_cpu()) {
    const at::Tensor rounded = values.to(copy.scalar_type()).view(at::kShort);
    values.copy_(at::where(rounded.eq(copy.view(at::kShort)), values, copy.to(at::kFloat)));
    return;
  }
  check_flat({kAdoptCopy, "values"}, values);
  check_alike({kAdoptCopy, "copy"}, copy, values);
  // Only read: the loops take one kind of stretch.
  FlatStretch stretch{.values = values.mutable_data_ptr<float>(),
                      .copy_out = const_cast<void*>(copy.const_data_ptr()),
                      .copy_precision = precision,
                      .numel = values.numel()};
  parallel_for(values.numel(), kAdoptedNumelPerThread,
               [&](int64_t begin, int64_t end) { optim::cpu::adopt_copy(stretch, begin, end); });
}

}  // namespace zeropage::optim
