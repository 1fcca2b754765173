#include "zeropage/weight_average.h"

#include "zero/averaged_pages.h"

namespace zeropage {

WeightAverage::WeightAverage(const ModelRef& model, const WeightAverageOptions& options)
    : pages_(std::make_unique<zero::AveragedPages>(model, options.decay)) {}

WeightAverage::~WeightAverage() = default;

void WeightAverage::update() {
  pages_->update();
}

void WeightAverage::swap_in() {
  pages_->swap_in();
}

void WeightAverage::swap_out() {
  pages_->swap_out();
}

bool WeightAverage::is_swapped_in() const {
  return pages_->is_swapped_in();
}

zero::AveragedPages& pages_of(WeightAverage& average) {
  return *average.pages_;
}

}  // namespace zeropage
