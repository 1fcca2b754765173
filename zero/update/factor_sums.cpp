#include "zero/update/factor_sums.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "optim/factored_moments.h"
#include "zero/update/page_updates.h"
#include "zeropage/communicator.h"

namespace zeropage::zero {

// Where a parameter's sums are in those of all.
struct FactorSums::Place {
  Parameter of;
  optim::FactoredShape shape;
  int64_t begin = 0;
  bool is_here = false;  // a part of it is this rank's

  at::Tensor in(const at::Tensor& all) const { return all.narrow(0, begin, shape.sums()); }
};

std::vector<FactorSums::Place> FactorSums::places_of(const std::vector<Parameter>& of) const {
  std::vector<Place> places;
  int64_t end = 0;
  for (const Parameter& parameter : of) {
    const PlacedParameter& placed = parameters_.pages->parameters()[parameter.parameter];
    const Range here = intersection(parameters_.pages->owned(placed.page), placed.range);
    places.push_back({.of = parameter,
                      .shape = optim::factored_shape(placed.parameter.tensor.sizes()),
                      .begin = end,
                      .is_here = !here.empty()});
    end += places.back().shape.sums();
  }
  return places;
}

// Calls make(update, place, gradient, part) for each parameter of which this rank has a part: `part` is of `all`, on the gradient's
// device.
template <typename Make>
void FactorSums::make_parts(const std::vector<Place>& places, const at::Tensor& all,
                            const Make& make) const {
  for (const Place& place : places) {
    if (!place.is_here) continue;
    const at::Tensor gradient = gradient_of_(place.of.page);
    at::Tensor in_all = place.in(all);
    const at::Tensor part = in_all.to(gradient.device());
    make(*updates_.all()[place.of.page].update->factored(), place, gradient, part);
    if (!part.is_same(in_all)) in_all.copy_(part);
  }
}

void FactorSums::run(const std::vector<Parameter>& of) const {
  if (of.empty()) return;
  const ParameterPages& pages = *parameters_.pages;
  comm::Communicator& communicator = pages.shards().communicator();
  const bool is_shared =
      pages.shards().size() > 1 && pages.plan().ownership() != Ownership::kWholePage;
  const std::vector<Place> places = places_of(of);
  const int64_t numel = places.back().begin + places.back().shape.sums();
  const auto zeros = [&](at::ScalarType dtype) {
    return at::zeros({numel}, at::TensorOptions(communicator.device()).dtype(dtype));
  };

  const at::Tensor magnitudes = zeros(at::kFloat);
  make_parts(places, magnitudes,
             [&](FactoredParameters& update, const Place& place, const at::Tensor& gradient,
                 const at::Tensor& part) {
               update.raise_to_magnitudes(place.of.parameter, gradient, scale_, part);
             });
  if (is_shared) {
    communicator.all_reduce(magnitudes, comm::ReduceOp::kMax, "largest gradients of rows").wait();
  }

  const at::Tensor sums = zeros(at::kDouble);
  make_parts(places, sums,
             [&](FactoredParameters& update, const Place& place, const at::Tensor& gradient,
                 const at::Tensor& part) {
               const at::Tensor windows =
                   optim::windows_of(place.shape, place.in(magnitudes).to(part.device()));
               update.add_squares(place.of.parameter, gradient, scale_, windows, part);
             });
  if (is_shared) {
    communicator.all_reduce(sums, comm::ReduceOp::kSum, "sums over rows and columns").wait();
  }
  make_parts(places, sums,
             [&](FactoredParameters& update, const Place& place, const at::Tensor& /*gradient*/,
                 const at::Tensor& part) { update.take(place.of.parameter, part); });
}

}  // namespace zeropage::zero
