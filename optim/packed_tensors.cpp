#include "optim/packed_tensors.h"

#include "optim/flat_tensor.h"
#include "zeropage/check.h"

namespace zeropage::optim {
namespace {

void check_scales(const Stretch& stretch, StateFormat format) {
  const size_t expected = format == StateFormat::k8Bit ? stretch.states.size() : 0;
  ZP_CHECK(stretch.scales.size() == expected, kFusedStep, ": scales: expected ", expected,
           " with states in ",
           stretch.states.empty() ? at::kFloat : stretch.states.front().scalar_type(), ", got ",
           stretch.scales.size(),
           "; make_scales(options, values, first_in_block) makes "
           "those of 8-bit states");
  const int64_t blocks = blocks_of(stretch.place.first_in_block, stretch.values.numel());
  for (const at::Tensor& scales : stretch.scales) {
    check_flat({kFusedStep, "scales"}, scales);
    check_fp32({kFusedStep, "scales"}, scales);
    ZP_CHECK(scales.numel() == blocks && scales.device() == stretch.values.device(), kFusedStep,
             ": scales: expected ", blocks, " on ", stretch.values.device(), ", one a block of ",
             stretch.values.numel(), " elements from place ", stretch.place.first_in_block,
             " of one, got ", scales.numel(), " on ", scales.device());
  }
}

void check_place(const Stretch& stretch, StateFormat format) {
  const StretchPlace& place = stretch.place;
  ZP_CHECK(place.first_in_block >= 0 && place.first_in_block < kStateBlockNumel, kFusedStep,
           ": place.first_in_block: expected 0 to ", kStateBlockNumel - 1, ", got ",
           place.first_in_block);
  if (format != StateFormat::kBf16) return;
  ZP_CHECK(place.parameter < kFirstStateTensor, kFusedStep,
           ": place.parameter: expected less than 2^30, got ", place.parameter,
           "; number the parameters from 0");
  ZP_CHECK(place.first_element >= 0 &&
               place.first_element <= kMostRoundingNumel - stretch.values.numel(),
           kFusedStep, ": place.first_element: expected 0 or more and ", stretch.values.numel(),
           " elements from it within 2^51, got ", place.first_element,
           "; count from the parameter's beginning");
}

void check_remainders(const Stretch& stretch) {
  const at::Tensor& remainders = stretch.remainders;
  if (!remainders.defined()) return;
  check_alike({kFusedStep, "remainders"}, remainders, stretch.values);
  ZP_CHECK(remainders.scalar_type() == at::kShort, kFusedStep, ": remainders: expected int16, got ",
           remainders.scalar_type(), "; split_values(fp32) makes them");
  ZP_CHECK(stretch.values.scalar_type() == at::kBFloat16, kFusedStep,
           ": values: expected bf16 beside remainders, got ", stretch.values.scalar_type(),
           "; split_values(fp32) makes both");
  ZP_CHECK(!stretch.copy_out.defined(), kFusedStep,
           ": copy_out: expected none beside remainders, since the values are bf16 already");
}

}  // namespace

StateFormat format_of(const Stretch& stretch) {
  if (stretch.states.empty()) return StateFormat::kFp32;
  switch (stretch.states.front().scalar_type()) {
    case at::kFloat:
      return StateFormat::kFp32;
    case at::kBFloat16:
      return StateFormat::kBf16;
    case at::kByte:
      return StateFormat::k8Bit;
    default:
      ZP_THROW(kFusedStep, ": a state: expected fp32, bf16 or uint8, got ",
               stretch.states.front().scalar_type(), "; make_states makes them");
  }
}

bool is_packed(const Stretch& stretch) {
  return stretch.remainders.defined() || format_of(stretch) != StateFormat::kFp32;
}

void check_packed(const Stretch& stretch, StateFormat format) {
  check_place(stretch, format);
  check_scales(stretch, format);
  check_remainders(stretch);
}

PackedStretch packed_of(const Stretch& stretch, const FlatStretch& flat, int64_t step) {
  PackedStretch packed{.flat = flat, .format = format_of(stretch)};
  for (size_t i = 0; i < stretch.states.size(); ++i) {
    packed.states[i] = stretch.states[i].mutable_data_ptr();
  }
  for (size_t i = 0; i < stretch.scales.size(); ++i) {
    packed.scales[i] = stretch.scales[i].mutable_data_ptr<float>();
  }
  packed.first_in_block = stretch.place.first_in_block;
  packed.place = {.seed = stretch.place.seed,
                  .step = static_cast<uint64_t>(step),
                  .tensor = stretch.place.parameter,
                  .first_element = stretch.place.first_element};
  if (stretch.remainders.defined()) {
    packed.high = static_cast<BFloat16Bits*>(stretch.values.mutable_data_ptr());
    packed.low = static_cast<uint16_t*>(stretch.remainders.mutable_data_ptr());
  }
  return packed;
}

}  // namespace zeropage::optim
