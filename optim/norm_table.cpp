#include "optim/norm_table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <span>
#include <type_traits>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include "optim/cpu/flat_norm.h"
#include "optim/cuda/current_stream.h"
#include "optim/cuda/flat_norm.h"
#include "optim/flat_tensor.h"
#include "optim/parallel.h"
#include "zeropage/check.h"

namespace zeropage::optim {
namespace {

// The least that is worth a thread of its own.
constexpr int64_t kTableNumelPerThread = 32768;

// Whose squares LibTorch's operators take at once, in some ten copies of 8 bytes an element.
constexpr int64_t kBlocksByOperators = 4096;

int64_t blocks_of_part(const NormPart& part) {
  return parts_of<int64_t>(part.numel, kBlockNumel);
}

// The bytes of the records, on the device.
template <typename Record>
at::Tensor records_on(const at::Device& device, const std::vector<Record>& records) {
  static_assert(std::is_trivially_copyable_v<Record> && sizeof(Record) % sizeof(int64_t) == 0);
  constexpr int64_t kWords = sizeof(Record) / sizeof(int64_t);
  at::Tensor bytes = at::empty({static_cast<int64_t>(records.size()), kWords}, at::kLong);
  std::memcpy(bytes.mutable_data_ptr(), records.data(), records.size() * sizeof(Record));
  return bytes.to(device);
}

at::Tensor longs_on(const at::Device& device, std::vector<int64_t>& values) {
  return at::from_blob(values.data(), {static_cast<int64_t>(values.size())}, at::kLong)
      .to(device, at::kLong, /*non_blocking=*/false, /*copy=*/true);
}

// fp64 terms as the digits, infinities and NaNs that they add, by LibTorch's operators.
void add_terms(const at::Tensor& terms, const at::Tensor& first_word, const at::Tensor& words) {
  const at::Tensor magnitude = terms.view(at::kLong).bitwise_and(INT64_MAX);
  const at::Tensor exponent = magnitude.bitwise_right_shift(kMantissaBits);
  const at::Tensor is_normal = exponent.ne(0).to(at::kLong);
  const at::Tensor is_finite = magnitude.lt(static_cast<int64_t>(kInfinityBits)).to(at::kLong);
  const at::Tensor mantissa = (magnitude.bitwise_and(static_cast<int64_t>(kImplicitBit - 1)) +
                               is_normal.bitwise_left_shift(kMantissaBits)) *
                              is_finite;
  const at::Tensor place = exponent - is_normal;
  const at::Tensor shift = place.bitwise_and(kDigitBits - 1);
  const at::Tensor digit = first_word + place.bitwise_right_shift(5);
  static_assert(kDigitBits == 1 << 5 && kDigitsOfTerm == 3);
  const auto add = [&](const at::Tensor& to, const at::Tensor& what) {
    at::Tensor(words).index_add_(0, to, what);
  };
  const auto mask = static_cast<int64_t>(kDigitMask);
  add(digit, mantissa.bitwise_left_shift(shift).bitwise_and(mask));
  const at::Tensor rest = at::rsub(shift, kDigitBits);
  add(digit + 1, mantissa.bitwise_right_shift(rest).bitwise_and(mask));
  add(digit + 2, mantissa.bitwise_right_shift(kDigitBits).bitwise_right_shift(rest));
  add(first_word + kInfinitiesWord,
      magnitude.eq(static_cast<int64_t>(kInfinityBits)).to(at::kLong));
  add(first_word + kNansWord, magnitude.gt(static_cast<int64_t>(kInfinityBits)).to(at::kLong));
}

}  // namespace

at::Tensor NormSizes::make_words(const at::Device& device) const {
  return at::zeros({words()}, at::TensorOptions(device).dtype(at::kLong));
}

ExactSum NormSizes::sum(const int64_t* words, int64_t index) const {
  return ExactSum::from_uncarried(
      std::span<const int64_t, ExactSum::kWords>(words + index * kExactWords, ExactSum::kWords));
}

bool NormSizes::flag(const int64_t* words, int64_t index) const {
  const int64_t word = words[sums * kExactWords + index / kFlagsPerWord];
  return (word >> index % kFlagsPerWord & 1) != 0;
}

NormTable::NormTable(std::vector<NormPart> parts, const NormSizes& sizes, const at::Device& device)
    : sizes_(sizes), device_(device), parts_(std::move(parts)) {
  std::stable_sort(parts_.begin(), parts_.end(),
                   [](const NormPart& a, const NormPart& b) { return a.sum < b.sum; });
  std::vector<NormRange> ranges(static_cast<size_t>(sizes_.sums));
  std::vector<int64_t> sum_of_block;
  std::vector<int64_t> flag_of_block;
  for (size_t index = 0; index < parts_.size(); ++index) {
    NormPart& part = parts_[index];
    TORCH_INTERNAL_ASSERT(part.begin >= 0 && part.numel > 0 && part.sum >= 0 &&
                          part.sum < sizes_.sums && part.flag >= 0 && part.flag < sizes_.flags);
    NormRange& range = ranges[static_cast<size_t>(part.sum)];
    if (range.parts++ == 0) range.first_part = static_cast<int64_t>(index);
    part.first_block = range.blocks;
    const int64_t of_part = blocks_of_part(part);
    range.blocks += of_part;
    first_element_.push_back(numel_);
    numel_ += part.numel;
    end_ = std::max(end_, part.begin + part.numel);
    most_blocks_ = std::max(most_blocks_, range.blocks);
    if (device_.is_cpu() || device_.is_cuda()) continue;
    sum_of_block.insert(sum_of_block.end(), static_cast<size_t>(of_part), part.sum * kExactWords);
    flag_of_block.insert(flag_of_block.end(), static_cast<size_t>(of_part), part.flag);
  }
  if (device_.is_cpu() || parts_.empty()) return;
  if (device_.is_cuda()) {
    parts_there_ = records_on(device_, parts_);
    ranges_there_ = records_on(device_, ranges);
  } else {
    sum_of_block_ = longs_on(device_, sum_of_block);
    flag_of_block_ = longs_on(device_, flag_of_block);
    std::vector<int64_t> bit_values(kFlagsPerWord);
    for (size_t bit = 0; bit < bit_values.size(); ++bit) bit_values[bit] = int64_t{1} << bit;
    bit_values_ = longs_on(device_, bit_values);
  }
}

void NormTable::check(const at::Tensor& gradient, const at::Tensor& words) const {
  ZP_CHECK(gradient.dim() == 1 && gradient.numel() >= end_ && gradient.device() == device_,
           "NormTable::add_squares: gradient: expected ", end_, " elements or more on ", device_,
           ", got sizes ", gradient.sizes(), " on ", gradient.device(),
           "; make a table of the parts of this one");
  ZP_CHECK(words.scalar_type() == at::kLong && words.dim() == 1 && words.is_contiguous() &&
               words.numel() == sizes_.words() && words.device() == device_,
           "NormTable::add_squares: words: expected ", sizes_.words(), " of Long on ", device_,
           ", got ", words.scalar_type(), " of sizes ", words.sizes(), " on ", words.device(),
           "; sizes().make_words(device) makes them");
}

void NormTable::add_squares(const at::Tensor& gradient, const at::Tensor& words) const {
  check(gradient, words);
  if (parts_.empty()) return;
  if (device_.is_cpu()) return add_on_host(gradient, words.mutable_data_ptr<int64_t>());
  if (!device_.is_cuda()) return add_by_operators(gradient, words);
  const FlatElements elements = flat_elements({"NormTable::add_squares", "gradient"}, gradient);
  const c10::DeviceGuard guard(device_);
  optim::cuda::add_norm_parts(
      elements, static_cast<const NormPart*>(parts_there_.const_data_ptr()),
      static_cast<const NormRange*>(ranges_there_.const_data_ptr()), most_blocks_,
      {.first = static_cast<uint64_t*>(words.mutable_data_ptr()), .sums = sizes_.sums},
      optim::cuda::current_stream(device_));
}

void NormTable::add_on_host(const at::Tensor& gradient, int64_t* words) const {
  const FlatElements elements = flat_elements({"NormTable::add_squares", "gradient"}, gradient);
  std::mutex mutex;
  const auto tell = [&](int64_t sum, ExactDigits& digits) {
    digits.carry();
    const std::scoped_lock lock(mutex);
    for (int64_t i = 0; i < kExactWords; ++i) {
      words[sum * kExactWords + i] += static_cast<int64_t>(digits.words[i]);
    }
    digits = {};
  };
  const auto raise = [&](int64_t flag) {
    const std::scoped_lock lock(mutex);
    words[sizes_.sums * kExactWords + flag / kFlagsPerWord] |= int64_t{1} << flag % kFlagsPerWord;
  };
  // Elements of all parts, counted through.
  parallel_for(numel_, kTableNumelPerThread, [&](int64_t begin, int64_t end) {
    const auto after = std::upper_bound(first_element_.begin(), first_element_.end(), begin);
    ExactDigits digits;
    for (auto index = static_cast<size_t>(after - first_element_.begin()) - 1; begin < end;
         ++index) {
      const NormPart& part = parts_[index];
      const int64_t first = begin - first_element_[index];
      const int64_t last = std::min(part.numel, end - first_element_[index]);
      if (!optim::cpu::add_squares(elements, part.begin + first, part.begin + last, digits)) {
        raise(part.flag);
      }
      begin = first_element_[index] + last;
      if (begin == end || parts_[index + 1].sum != part.sum) tell(part.sum, digits);
    }
  });
}

// The blocks side by side, ragged ones filled up with zeros: one copy, however many parts there are.
void NormTable::add_by_operators(const at::Tensor& gradient, const at::Tensor& words) const {
  const at::Tensor zeros = at::zeros({kBlockNumel}, gradient.options());
  std::vector<at::Tensor> pieces;
  for (const NormPart& part : parts_) {
    pieces.push_back(gradient.narrow(0, part.begin, part.numel));
    const int64_t missing = blocks_of_part(part) * kBlockNumel - part.numel;
    if (missing > 0) pieces.push_back(zeros.narrow(0, 0, missing));
  }
  const at::Tensor elements = at::cat(pieces).view({-1, kBlockNumel});
  const int64_t first_flag = sizes_.sums * kExactWords;
  const int64_t flag_words = sizes_.flag_words();
  const at::Tensor sums = words.narrow(0, 0, first_flag);
  for (int64_t begin = 0; begin < elements.size(0); begin += kBlocksByOperators) {
    const int64_t blocks = std::min(kBlocksByOperators, elements.size(0) - begin);
    const auto of_elements = [&](const at::Tensor& of_block) {
      const at::Tensor column = of_block.narrow(0, begin, blocks).unsqueeze(1);
      return column.expand({blocks, kBlockNumel}).reshape({-1});
    };
    const at::Tensor wide = elements.narrow(0, begin, blocks).to(at::kDouble).view({-1});
    const at::Tensor squares = wide * wide;
    const at::Tensor added = at::zeros_like(sums);
    add_terms(squares, of_elements(sum_of_block_), added);
    sums.add_(added.bitwise_and(static_cast<int64_t>(kDigitMask)));
    sums.narrow(0, 1, first_flag - 1)
        .add_(added.narrow(0, 0, first_flag - 1).bitwise_right_shift(kDigitBits));
    const at::Tensor not_finite = squares.isfinite().logical_not().to(at::kLong);
    at::Tensor counts = at::zeros({flag_words * kFlagsPerWord}, words.options());
    counts.index_add_(0, of_elements(flag_of_block_), not_finite);
    const at::Tensor bits =
        counts.ne(0).to(at::kLong).view({flag_words, kFlagsPerWord}).mul(bit_values_).sum(1);
    words.narrow(0, first_flag, flag_words).bitwise_or_(bits);
  }
}

}  // namespace zeropage::optim
