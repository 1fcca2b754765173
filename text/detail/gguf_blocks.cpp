// Layouts and formulas are those of ggml-quants.c (github.com/ggml-org/ggml).
#include "text/detail/gguf_blocks.h"

#include <array>
#include <bit>
#include <cstring>
#include <iterator>

namespace zeropage::text::detail {
namespace {

template <typename T>
T load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

uint8_t byte(const char* block, size_t at) {
  return static_cast<uint8_t>(block[at]);
}

// Without branches, so that the compiler vectorises loops over it.
float from_half(uint16_t half) {
  const uint32_t wide = static_cast<uint32_t>(half) << 16;
  const uint32_t sign = wide & 0x80000000U;
  const uint32_t doubled = wide + wide;
  const float normal = std::bit_cast<float>((doubled >> 4) + (0xE0U << 23)) * 0x1.0p-112F;
  const float subnormal = std::bit_cast<float>((doubled >> 17) | (126U << 23)) - 0.5F;
  const uint32_t bits = std::bit_cast<uint32_t>(doubled < (1U << 27) ? subnormal : normal);
  return std::bit_cast<float>(sign | bits);
}

float half_at(const char* block, size_t at) {
  return from_half(load<uint16_t>(block + at));
}

void unpack_f32(const char* block, float* out) {
  std::memcpy(out, block, sizeof(float));
}
void unpack_f16(const char* block, float* out) {
  *out = half_at(block, 0);
}
void unpack_bf16(const char* block, float* out) {
  *out = std::bit_cast<float>(static_cast<uint32_t>(load<uint16_t>(block)) << 16);
}

// Blocks of 32: low nibbles are the first 16 elements, high ones the others.
void unpack_q4_0(const char* block, float* out) {
  const float scale = half_at(block, 0);
  for (size_t i = 0; i < 16; ++i) {
    const int both = byte(block, 2 + i);
    out[i] = static_cast<float>((both & 15) - 8) * scale;
    out[i + 16] = static_cast<float>((both >> 4) - 8) * scale;
  }
}

void unpack_q4_1(const char* block, float* out) {
  const float scale = half_at(block, 0);
  const float least = half_at(block, 2);
  for (size_t i = 0; i < 16; ++i) {
    const int both = byte(block, 4 + i);
    out[i] = static_cast<float>(both & 15) * scale + least;
    out[i + 16] = static_cast<float>(both >> 4) * scale + least;
  }
}

// A fifth bit for each of 32 elements lies apart, in 4 bytes.
int with_fifth_bit(int nibble, uint32_t fifth_bits, size_t element) {
  return nibble | static_cast<int>(fifth_bits >> element & 1) << 4;
}

void unpack_q5_0(const char* block, float* out) {
  const float scale = half_at(block, 0);
  const auto fifth = load<uint32_t>(block + 2);
  for (size_t i = 0; i < 16; ++i) {
    const int both = byte(block, 6 + i);
    out[i] = static_cast<float>(with_fifth_bit(both & 15, fifth, i) - 16) * scale;
    out[i + 16] = static_cast<float>(with_fifth_bit(both >> 4, fifth, i + 16) - 16) * scale;
  }
}

void unpack_q5_1(const char* block, float* out) {
  const float scale = half_at(block, 0);
  const float least = half_at(block, 2);
  const auto fifth = load<uint32_t>(block + 4);
  for (size_t i = 0; i < 16; ++i) {
    const int both = byte(block, 8 + i);
    out[i] = static_cast<float>(with_fifth_bit(both & 15, fifth, i)) * scale + least;
    out[i + 16] = static_cast<float>(with_fifth_bit(both >> 4, fifth, i + 16)) * scale + least;
  }
}

void unpack_q8_0(const char* block, float* out) {
  const float scale = half_at(block, 0);
  for (size_t i = 0; i < 32; ++i) out[i] = static_cast<float>(load<int8_t>(block + 2 + i)) * scale;
}

// Q4_K and Q5_K have 8 sub-blocks of 32 with a scale and a minimum of 6 bits each, in 12 bytes.
struct SubBlock {
  float scale;
  float least;
};
SubBlock sub_block(const char* block, size_t index) {
  const char* const packed = block + 4;
  int scale = 0;
  int least = 0;
  if (index < 4) {
    scale = byte(packed, index) & 63;
    least = byte(packed, index + 4) & 63;
  } else {
    scale = (byte(packed, index + 4) & 15) | (byte(packed, index - 4) >> 6) << 4;
    least = (byte(packed, index + 4) >> 4) | (byte(packed, index) >> 6) << 4;
  }
  return {half_at(block, 0) * static_cast<float>(scale),
          half_at(block, 2) * static_cast<float>(least)};
}

void unpack_q4_k(const char* block, float* out) {
  const char* nibbles = block + 16;
  for (size_t pair = 0; pair < 4; ++pair, nibbles += 32, out += 64) {
    const SubBlock low = sub_block(block, 2 * pair);
    const SubBlock high = sub_block(block, 2 * pair + 1);
    for (size_t i = 0; i < 32; ++i) {
      const int both = byte(nibbles, i);
      out[i] = low.scale * static_cast<float>(both & 15) - low.least;
      out[i + 32] = high.scale * static_cast<float>(both >> 4) - high.least;
    }
  }
}

void unpack_q5_k(const char* block, float* out) {
  const char* const fifth = block + 16;
  const char* nibbles = block + 48;
  for (size_t pair = 0; pair < 4; ++pair, nibbles += 32, out += 64) {
    const SubBlock low = sub_block(block, 2 * pair);
    const SubBlock high = sub_block(block, 2 * pair + 1);
    for (size_t i = 0; i < 32; ++i) {
      const int both = byte(nibbles, i);
      const uint32_t bits = byte(fifth, i);
      out[i] =
          low.scale * static_cast<float>(with_fifth_bit(both & 15, bits, 2 * pair)) - low.least;
      out[i + 32] = high.scale * static_cast<float>(with_fifth_bit(both >> 4, bits, 2 * pair + 1)) -
                    high.least;
    }
  }
}

// 16 sub-blocks of 16 with a scale of 8 bits; the two upper of an element's 6 bits lie apart.
void unpack_q6_k(const char* block, float* out) {
  const float scale = half_at(block, 208);
  for (size_t half = 0; half < 2; ++half, out += 128) {
    const char* const low = block + 64 * half;
    const char* const high = block + 128 + 32 * half;
    const char* const scales = block + 192 + 8 * half;
    for (size_t i = 0; i < 128; ++i) {
      const int both = byte(low, i % 64);
      const int nibble = i < 64 ? both & 15 : both >> 4;
      const int upper = byte(high, i % 32) >> (2 * (i / 32)) & 3;
      const float sub_scale = scale * static_cast<float>(load<int8_t>(scales + i / 16));
      out[i] = sub_scale * static_cast<float>((nibble | upper << 4) - 32);
    }
  }
}

template <auto kUnpackOne, size_t kNumel, size_t kBytes>
void unpack_all(const char* blocks, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) kUnpackOne(blocks + i * kBytes, out + i * kNumel);
}

template <auto kUnpackOne, uint32_t kNumel, uint32_t kBytes>
constexpr GgufBlock block(const char* name) {
  return {name, kNumel, kBytes, unpack_all<kUnpackOne, kNumel, kBytes>};
}

// By the format's number. Types without a name were withdrawn.
constexpr std::array<GgufBlock, 40> kBlocks = {{
    block<unpack_f32, 1, 4>("F32"),
    block<unpack_f16, 1, 2>("F16"),
    block<unpack_q4_0, 32, 18>("Q4_0"),
    block<unpack_q4_1, 32, 20>("Q4_1"),
    {},
    {},
    block<unpack_q5_0, 32, 22>("Q5_0"),
    block<unpack_q5_1, 32, 24>("Q5_1"),
    block<unpack_q8_0, 32, 34>("Q8_0"),
    {"Q8_1", 32, 36, nullptr},
    {"Q2_K", 256, 84, nullptr},
    {"Q3_K", 256, 110, nullptr},
    block<unpack_q4_k, 256, 144>("Q4_K"),
    block<unpack_q5_k, 256, 176>("Q5_K"),
    block<unpack_q6_k, 256, 210>("Q6_K"),
    {"Q8_K", 256, 292, nullptr},
    {"IQ2_XXS", 256, 66, nullptr},
    {"IQ2_XS", 256, 74, nullptr},
    {"IQ3_XXS", 256, 98, nullptr},
    {"IQ1_S", 256, 50, nullptr},
    {"IQ4_NL", 32, 18, nullptr},
    {"IQ3_S", 256, 110, nullptr},
    {"IQ2_S", 256, 82, nullptr},
    {"IQ4_XS", 256, 136, nullptr},
    {"I8", 1, 1, nullptr},
    {"I16", 1, 2, nullptr},
    {"I32", 1, 4, nullptr},
    {"I64", 1, 8, nullptr},
    {"F64", 1, 8, nullptr},
    {"IQ1_M", 256, 56, nullptr},
    block<unpack_bf16, 1, 2>("BF16"),
    {},
    {},
    {},
    {"TQ1_0", 256, 54, nullptr},
    {"TQ2_0", 256, 66, nullptr},
    {},
    {},
    {},
    {"MXFP4", 32, 17, nullptr},
}};

}  // namespace

const GgufBlock* block_of(GgufType type) {
  const auto number = static_cast<size_t>(type);
  return number < kBlocks.size() && kBlocks[number].name != nullptr ? &kBlocks[number] : nullptr;
}

}  // namespace zeropage::text::detail
