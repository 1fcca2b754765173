#include "optim/cpu/instructions.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace zeropage::optim::cpu {
namespace {

constexpr const char* kVariable = "ZEROPAGE_CPU_CAPABILITY";
constexpr Instructions kAll[] = {Instructions::kAnyProcessor, Instructions::kAvx2,
                                 Instructions::kAvx512};

std::string names_up_to(Instructions most) {
  std::string names;
  for (const Instructions set : kAll) {
    if (set > most) break;
    if (!names.empty()) names += set == most ? " or " : ", ";
    names += name_of(set);
  }
  return names;
}

}  // namespace

std::string_view name_of(Instructions instructions) {
  switch (instructions) {
    case Instructions::kAnyProcessor:
      break;
    case Instructions::kAvx2:
      return "avx2";
    case Instructions::kAvx512:
      return "avx512";
  }
  return "default";
}

Instructions instructions_of_processor() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    return Instructions::kAnyProcessor;
  }
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has_avx512 ? Instructions::kAvx512 : Instructions::kAvx2;
#else
  return Instructions::kAnyProcessor;
#endif
}

Instructions instructions_named(std::string_view text, Instructions most) {
  for (const Instructions set : kAll) {
    if (set <= most && text == name_of(set)) return set;
  }
  throw std::invalid_argument(std::string(kVariable) + ": expected " + names_up_to(most) +
                              ", which this processor has, got \"" + std::string(text) +
                              "\"; name one of these, or unset it for the best of them");
}

Instructions best_instructions() {
  static const Instructions best = [] {
    const Instructions most = instructions_of_processor();
    const char* const text = std::getenv(kVariable);
    return text == nullptr ? most : instructions_named(text, most);
  }();
  return best;
}

}  // namespace zeropage::optim::cpu
