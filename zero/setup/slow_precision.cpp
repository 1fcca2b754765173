#include "zero/setup/slow_precision.h"

#include <atomic>
#include <iostream>

#include <c10/util/StringUtil.h>

namespace zeropage {

HostPrecisions HostPrecisions::of_this_host() {
  const bool tiles = __builtin_cpu_supports("amx-bf16") != 0;
  return {.bfloat16 = tiles || __builtin_cpu_supports("avx512bf16") != 0,
          .half = __builtin_cpu_supports("avx512fp16") != 0};
}

std::string words_on_slow_precision(const std::vector<c10::ScalarType>& dtypes,
                                    const HostPrecisions& host) {
  const auto words = [](const char* dtype, const char* instructions) {
    return c10::str(
        "zeropage: the model computes in ", dtype, ", for which this host's processor has no ",
        "instructions (", instructions,
        "): a step may take several times as long as in float (22 s against 3 s, of one "
        "model); leave options.compute_dtype out on this host, or keep it for the memory alone\n");
  };
  for (const c10::ScalarType dtype : dtypes) {
    if (dtype == c10::kBFloat16 && !host.bfloat16)
      return words("bfloat16", "avx512_bf16, amx_bf16");
    if (dtype == c10::kHalf && !host.half) return words("half", "avx512_fp16");
  }
  return "";
}

void tell_of_slow_precision(const comm::World& world, const std::vector<PageLayout>& layouts) {
  static std::atomic<bool> told{false};
  if (!world.device().is_cpu() || world.rank() != 0) return;
  std::vector<c10::ScalarType> dtypes;
  for (const PageLayout& page : layouts) dtypes.push_back(page.dtype);
  const std::string words = words_on_slow_precision(dtypes, HostPrecisions::of_this_host());
  if (!words.empty() && !told.exchange(true)) std::cerr << words;
}

}  // namespace zeropage
