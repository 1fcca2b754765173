#include "zero/setup/slow_precision.h"

#include <atomic>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <iostream>

#include <c10/util/StringUtil.h>

namespace zeropage::zero {

// By CPUID's leaf 7 (Intel, "Software Developer's Manual", volume 2A): compilers differ in the names that they know. What the operating
// system keeps of it does not matter for a word on speed.
HostPrecisions HostPrecisions::of_this_host() {
#if defined(__x86_64__)
  constexpr unsigned kLeaf = 7, kAvx512Bf16 = 1U << 5, kAmxBf16 = 1U << 22, kAvx512Fp16 = 1U << 23;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0, of_second = 0;
  if (__get_cpuid_count(kLeaf, 1, &eax, &ebx, &ecx, &edx) != 0) of_second = eax;
  if (__get_cpuid_count(kLeaf, 0, &eax, &ebx, &ecx, &edx) == 0) return {};
  return {.bfloat16 = (of_second & kAvx512Bf16) != 0 || (edx & kAmxBf16) != 0,
          .half = (edx & kAvx512Fp16) != 0};
#else
  return {.bfloat16 = true, .half = true};
#endif
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

}  // namespace zeropage::zero
