#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include "checkpointing/detail/region.h"
#include "zeropage/checkpoint.h"

namespace zeropage::checkpointing {

RegionRun::RegionRun(RegionOptions options)
    : region_(std::make_shared<detail::Region>(std::move(options))) {}

RegionRun::~RegionRun() = default;

bool RegionRun::worth_it() {
  return at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
}

void RegionRun::keep_input(const at::Tensor& tensor, const std::string& name) {
  region_->keep_input(tensor, name);
}

void RegionRun::begin(std::function<void(const NextInput&)> again) {
  region_->set_function(std::move(again));
  forward_ = std::make_unique<detail::RegionForward>(region_);
}

void RegionRun::see_result(const at::Tensor& tensor) {
  forward_->see_result(tensor);
}

void RegionRun::end() {
  forward_->end();
}

}  // namespace zeropage::checkpointing
