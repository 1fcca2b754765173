#include "zero/averaged_pages.h"

#include <utility>

#include <ATen/ATen.h>

#include "zero/model_parts.h"
#include "zero/owned_values.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/check.h"
#include "zeropage/ledger.h"

namespace zeropage::zero {
namespace {

// The same numbers bit for bit, NaNs included.
bool same_elements_as_bits(const at::Tensor& left, const at::Tensor& right) {
  return at::equal(left.contiguous().view(at::kByte), right.contiguous().view(at::kByte));
}

}  // namespace

AveragedPages::AveragedPages(const ModelRef& model, double decay)
    : model_(model),
      decay_(decay),
      holder_(model_->sharded().holders->add({.visit =
                                                  [this](const VisitMemory& visit) {
                                                    constexpr auto kKind =
                                                        memory::Kind::kOptimizerState;
                                                    for (const auto& of : average_)
                                                      visit(of, kKind);
                                                    for (const auto& of : own_) visit(of, kKind);
                                                  },
                                              .settle = [] { return std::string(); }})) {
  ZP_CHECK(decay_ >= 0 && decay_ < 1, "WeightAverage: expected a decay in [0, 1), got ", decay_);
  const PlacedParameters& parameters = model_->parameters();
  for (size_t index = 0; index < parameters.size(); ++index) {
    parameters_.emplace(parameters[index].parameter.name(), index);
  }
  const at::NoGradGuard no_grad;
  const memory::KindScope kind(memory::Kind::kOptimizerState);
  visit_exact_values(model_, "WeightAverage", [&](size_t page, const at::Tensor& exact) {
    owned_.push_back(model_->sharded().pages->owned(page));
    average_.push_back(exact.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true));
  });
}

bool AveragedPages::averages(const ParameterPages& pages) const {
  return model_->sharded().pages.get() == &pages;
}

void AveragedPages::check_is_out(const char* who) const {
  ZP_CHECK(!is_swapped_in_, who,
           ": the model has the average, and its own values wait here; call swap_out() first");
}

void AveragedPages::fit(size_t page) {
  const Range now = model_->sharded().pages->owned(page);
  if (now == owned_[page]) return;
  TORCH_INTERNAL_ASSERT(intersection(now, owned_[page]) == now);
  const memory::KindScope kind(memory::Kind::kOptimizerState);
  average_[page] = average_[page].narrow(0, now.begin - owned_[page].begin, now.numel()).clone();
  owned_[page] = now;
}

const at::Tensor& AveragedPages::average(size_t page) {
  fit(page);
  return average_[page];
}

void AveragedPages::update() {
  constexpr const char* kWho = "WeightAverage::update()";
  check_is_out(kWho);
  const at::NoGradGuard no_grad;
  visit_exact_values(model_, kWho, [&](size_t page, const at::Tensor& exact) {
    fit(page);
    // Each operator rounds once an element, wherever that lies; lerp_ rounds otherwise at the end of a tensor than within it.
    average_[page].mul_(decay_).add_(exact.to(at::kFloat), 1 - decay_);
  });
}

at::Tensor AveragedPages::part_of(const OwnedShard& shard,
                                  const std::vector<at::Tensor>& by_page) const {
  const PlacedParameters& parameters = model_->parameters();
  const PlacedParameter& placed = parameters[parameters_.at(shard.name)];
  if (shard.range.empty()) return by_page[placed.page].narrow(0, 0, 0);
  const int64_t in_page = placed.range.begin + shard.range.begin;
  return by_page[placed.page].narrow(0, in_page - owned_[placed.page].begin, shard.range.numel());
}

void AveragedPages::swap_in() {
  constexpr const char* kWho = "WeightAverage::swap_in()";
  check_is_out(kWho);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> own;
  {
    const memory::KindScope kind(memory::Kind::kOptimizerState);
    visit_exact_values(model_, kWho, [&](size_t page, const at::Tensor& exact) {
      fit(page);
      own.push_back(exact.clone());
    });
  }
  assign_owned_shards(model_, [&](const OwnedShard& shard) { return part_of(shard, average_); });
  own_ = std::move(own);
  is_swapped_in_ = true;
}

void AveragedPages::swap_out() {
  ZP_CHECK(is_swapped_in_,
           "WeightAverage::swap_out(): the model has its own values; call swap_in() first");
  const at::NoGradGuard no_grad;
  assign_owned_shards(model_, [&](const OwnedShard& shard) {
    const at::Tensor given = part_of(shard, average_).to(shard.exact.scalar_type());
    ZP_CHECK(same_elements_as_bits(given, shard.exact), "WeightAverage::swap_out(): parameter \"",
             shard.name,
             "\" was changed while the model had the average, by a training step or another write, "
             "and that would be lost; train after swap_out()");
    return part_of(shard, own_);
  });
  own_.clear();
  is_swapped_in_ = false;
}

}  // namespace zeropage::zero
