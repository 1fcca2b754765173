#include "zero/norms/gradient_scale.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include <ATen/ATen.h>

#include "zeropage/options.h"

namespace zeropage::zero {
namespace {

constexpr int64_t kSamplesOfParameter = 32;

// How far apart the quotients of elements may be that were multiplied by one number.
double rounding_of_quotients(at::ScalarType dtype) {
  return is_low_precision(dtype) ? 0.02 : 1e-4;
}

bool are_close(double a, double b, double rounding) {
  return std::abs(a - b) <= rounding * std::max(std::abs(a), std::abs(b));
}

// What the elements of one parameter were multiplied by.
struct QuotientOfParameter {
  std::optional<double> quotient;
  bool is_one = true;
  double rounding = 0;

  void add(double before, double after) {
    const double of_element = after / before;
    if (before == 0 || after == 0 || !std::isfinite(of_element)) return;
    if (!quotient) quotient = of_element;
    is_one = is_one && are_close(*quotient, of_element, rounding);
  }
};

// That of more than half of them; 1 where there is none.
double most_frequent(std::vector<double> quotients, double rounding) {
  std::sort(quotients.begin(), quotients.end());
  // If there is one, the middle one is among them.
  if (quotients.empty()) return 1;
  const double middle = quotients[quotients.size() / 2];
  const auto alike = std::count_if(quotients.begin(), quotients.end(), [&](double quotient) {
    return are_close(quotient, middle, rounding);
  });
  const bool is_most = 2 * static_cast<size_t>(alike) > quotients.size();
  return is_most && !are_close(middle, 1, rounding) ? middle : 1;
}

}  // namespace

GradientScale::Samples GradientScale::make_samples(size_t page) const {
  Samples samples;
  std::vector<int64_t> places;
  const Range owned = pages_->owned(page);
  for (const size_t index : pages_->parameters().of_page(page)) {
    const PlacedParameter& placed = pages_->parameters()[index];
    if (placed.parameter.is_tied) continue;
    const Range range = intersection(owned, placed.range);
    const int64_t count = std::min(kSamplesOfParameter, range.numel());
    for (int64_t sample = 0; sample < count; ++sample) {
      places.push_back(range.begin - owned.begin + sample * range.numel() / count);
      samples.parameters.push_back(index);
    }
  }
  if (!places.empty()) samples.places = at::tensor(places, at::kLong);
  return samples;
}

at::Tensor GradientScale::values_at(const at::Tensor& owned, const Samples& samples) {
  if (!owned.defined() || !samples.places.defined()) return {};
  return owned.index_select(0, samples.places).to(at::kDouble);
}

void GradientScale::note() {
  const at::NoGradGuard no_grad;
  of_pages_.resize(pages_->layouts().size());
  for (size_t page = 0; page < of_pages_.size(); ++page) {
    Samples& samples = of_pages_[page];
    const at::Tensor owned = gradients_->owned(page);
    samples.values.reset();
    if (!owned.defined() || owned.is_meta()) continue;
    gradients_->arrival(page).synchronize();
    if (samples.parameters.empty()) samples = make_samples(page);
    if (samples.places.defined()) samples.places = samples.places.to(owned.device());
    samples.values = values_at(owned, samples);
  }
  is_noted_ = true;
}

double GradientScale::take() {
  if (!std::exchange(is_noted_, false)) return 1;
  const at::NoGradGuard no_grad;
  std::map<size_t, QuotientOfParameter> by_parameter;
  double rounding = 0;
  for (size_t page = 0; page < of_pages_.size(); ++page) {
    Samples& samples = of_pages_[page];
    const at::Tensor owned = gradients_->owned(page);
    const at::Tensor before = std::exchange(samples.values, {});
    if (!before.defined() || !owned.defined()) continue;
    gradients_->arrival(page).synchronize();
    const at::Tensor both = at::stack({before, values_at(owned, samples)}).cpu();
    const double of_page = rounding_of_quotients(owned.scalar_type());
    rounding = std::max(rounding, of_page);
    const double* const values = both.const_data_ptr<double>();
    for (size_t sample = 0; sample < samples.parameters.size(); ++sample) {
      const size_t parameter = samples.parameters[sample];
      if (!gradients_->has(parameter)) continue;
      QuotientOfParameter& quotient = by_parameter[parameter];
      quotient.rounding = of_page;
      quotient.add(values[sample], values[samples.parameters.size() + sample]);
    }
  }
  std::vector<double> quotients;
  for (const auto& [unused, of_parameter] : by_parameter) {
    if (!of_parameter.quotient) continue;
    // No number is close to infinity.
    quotients.push_back(of_parameter.is_one ? *of_parameter.quotient
                                            : std::numeric_limits<double>::infinity());
  }
  return most_frequent(std::move(quotients), rounding);
}

}  // namespace zeropage::zero
