#include "optim/cpu/quantised_loops.h"

#define ZEROPAGE_SET

#include "optim/cpu/quantised_words_text.h"

namespace zeropage::optim::cpu {
namespace {

struct Words {
  static constexpr int kNumel = 32;

  template <StateSign kSign>
  static void widen(const uint8_t* codes, uint32_t* words) {
    for (int i = 0; i < kNumel; ++i) words[i] = widened<kSign>(codes[i]);
  }

  template <StateSign kSign>
  static void narrow(const uint32_t* magnitudes, const float* values, uint8_t* codes) {
    for (int i = 0; i < kNumel; ++i) {
      const uint32_t sign =
          kSign == StateSign::kSigned ? optim::rounded::bits_of(values[i]) >> 24 : 0;
      codes[i] = static_cast<uint8_t>(magnitudes[i] | (sign & 0x80U));
    }
  }
};

using Groups = GroupsByWords<Words>;

}  // namespace
}  // namespace zeropage::optim::cpu

#include "optim/cpu/quantised_loops_text.h"
#include "optim/cpu/quantised_passes_text.h"

namespace zeropage::optim::cpu {

const QuantisedLoops kQuantisedLoopsOnAnyProcessor = kLoopsOfSet;

}  // namespace zeropage::optim::cpu
