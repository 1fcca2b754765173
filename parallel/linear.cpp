#include <ATen/ATen.h>
#include <torch/nn/functional/linear.h>
#include <torch/nn/modules/linear.h>

#include "parallel/detail/sequence_linear.h"
#include "parallel/whole_values.h"
#include "zeropage/check.h"
#include "zeropage/parallel_layers.h"

namespace zeropage::parallel {
namespace {

// "ColumnParallelLinear(8, 24)"
std::string name_of(const char* layer, const LinearOptions& options) {
  return c10::str(layer, "(", options.in_features, ", ", options.out_features, ")");
}

std::string column_name(const LinearOptions& options) {
  return name_of("ColumnParallelLinear", options);
}

std::string row_name(const LinearOptions& options) {
  return name_of("RowParallelLinear", options);
}

torch::nn::Linear whole_layer(const LinearOptions& options) {
  return torch::nn::Linear(
      torch::nn::LinearOptions(options.in_features, options.out_features).bias(options.bias));
}

}  // namespace

ColumnParallelLinearImpl::ColumnParallelLinearImpl(const LinearOptions& options,
                                                   const comm::World& world)
    : options_(options), ranks_(ranks_of(world)) {
  ZP_CHECK(options.parts >= 1 && options.out_features % options.parts == 0, column_name(options),
           ": expected a number of outputs that ", options.parts,
           " parts divide; change one of them");
  ZP_CHECK(
      !(options.gathers_output && options.parts > 1), column_name(options), ": an output of ",
      options.parts,
      " parts cannot be gathered, as each part is cut for itself; leave it cut, or use 1 part");
  ZP_CHECK(!options.splits_input, column_name(options),
           ": splits_input is an option of RowParallelLinear; this layer's input is whole");
  if (!options.uneven && !options.gathers_output) {
    check_is_even(slices(), column_name(options), "LinearOptions::uneven");
  }
  reset();
}

Slices ColumnParallelLinearImpl::slices() const {
  return {options_.out_features / options_.parts, options_.unit, ranks_->world.size(),
          column_name(options_)};
}

SlicedDimension ColumnParallelLinearImpl::cut() const {
  return SlicedDimension(slices(), /*dim=*/0, options_.parts);
}

void ColumnParallelLinearImpl::reset() {
  const auto whole = whole_layer(options_);
  take_values_of_rank_zero(*whole, ranks_->world, column_name(options_));
  const int rank = ranks_->world.rank();
  weight = register_parameter("weight", cut().take(whole->weight, rank));
  bias = register_parameter("bias", options_.bias ? cut().take(whole->bias, rank) : at::Tensor(),
                            options_.bias);
}

torch::Tensor ColumnParallelLinearImpl::forward(const torch::Tensor& input) {
  const std::string name = column_name(options_);
  const torch::Tensor slice =
      options_.sequence_dim
          ? detail::linear_of_gathered(input, weight, bias, *options_.sequence_dim, ranks_, name)
          : at::linear(copy_to_ranks(input, ranks_, name), weight, bias);
  return options_.gathers_output ? gather_from_ranks(slice, slices(), ranks_, name) : slice;
}

std::vector<SlicedParameter> ColumnParallelLinearImpl::sliced_parameters() const {
  return {{weight, cut()}, {bias, cut()}};
}

void ColumnParallelLinearImpl::pretty_print(std::ostream& stream) const {
  stream << "zeropage::" << column_name(options_);
}

RowParallelLinearImpl::RowParallelLinearImpl(const LinearOptions& options, const comm::World& world)
    : options_(options), ranks_(ranks_of(world)) {
  ZP_CHECK(options.parts == 1 && !options.gathers_output, row_name(options),
           ": parts and gathers_output are options of ColumnParallelLinear; this layer's output is "
           "whole");
  if (!options.uneven && !options.splits_input) {
    check_is_even(slices(), row_name(options), "LinearOptions::uneven");
  }
  reset();
}

Slices RowParallelLinearImpl::slices() const {
  return {options_.in_features, options_.unit, ranks_->world.size(), row_name(options_)};
}

SlicedDimension RowParallelLinearImpl::cut() const {
  return SlicedDimension(slices(), /*dim=*/1);
}

void RowParallelLinearImpl::reset() {
  const auto whole = whole_layer(options_);
  take_values_of_rank_zero(*whole, ranks_->world, row_name(options_));
  weight = register_parameter("weight", cut().take(whole->weight, ranks_->world.rank()));
  bias = register_parameter("bias", options_.bias ? whole->bias.detach().clone() : at::Tensor(),
                            options_.bias);
}

torch::Tensor RowParallelLinearImpl::forward(const torch::Tensor& input) {
  const std::string name = row_name(options_);
  const torch::Tensor slice =
      options_.splits_input ? split_to_ranks(input, slices(), ranks_, name) : input;
  const torch::Tensor partial = at::linear(slice, weight);
  if (options_.sequence_dim) {
    return detail::scattered_sum(partial, bias, *options_.sequence_dim, ranks_, name);
  }
  const torch::Tensor output = reduce_from_ranks(partial, ranks_, name);
  return options_.bias ? output + bias : output;
}

std::vector<SlicedParameter> RowParallelLinearImpl::sliced_parameters() const {
  return {{weight, cut()}};
}

void RowParallelLinearImpl::pretty_print(std::ostream& stream) const {
  stream << "zeropage::" << row_name(options_);
}

}  // namespace zeropage::parallel
