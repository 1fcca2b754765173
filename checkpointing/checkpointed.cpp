#include "zeropage/checkpoint.h"

namespace zeropage::checkpointing {

at::Tensor checkpoint_sequential(torch::nn::Sequential sequential, int64_t segments, at::Tensor x) {
  const auto modules = static_cast<int64_t>(sequential->size());
  ZP_CHECK(segments >= 1 && segments <= modules, "checkpoint_sequential: expected 1 to ", modules,
           " segments, as many as there are modules, got ", segments);
  int64_t start = 0;
  for (int64_t segment = 0; segment < segments; ++segment) {
    const int64_t end = start + modules / segments + (segment < modules % segments ? 1 : 0);
    const auto run = [list = sequential.ptr(), start, end](at::Tensor state) {
      for (int64_t index = start; index < end; ++index) {
        state = std::next(list->begin(), index)->forward(std::move(state));
      }
      return state;
    };
    if (end == modules) return run(std::move(x));
    x = checkpoint({.name = c10::str("modules ", start, " to ", end - 1)}, run, std::move(x));
    start = end;
  }
  return x;
}

}  // namespace zeropage::checkpointing
