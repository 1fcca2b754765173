// Sums over the rows and the columns of gradients that ranks have parts of (optim/factored_moments.h), which an update's first pass
// reads.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/setup/sharded_model.h"
#include "zero/update/factored_parameters.h"

namespace zeropage::zero {

class PageUpdates;

// Adds the sums of all ranks. Two all-reduces: 4 bytes for each row and column, and 8.
// Lifetime: that of a call; uses what it is given. Collective: run(), over the ranks that share the pages.
class FactorSums {
 public:
  struct Parameter {
    size_t parameter = 0;
    size_t page = 0;  // of PageUpdates::all()
  };
  // The gradient of what this rank owns of a page, where the page is updated.
  using GradientOf = std::function<at::Tensor(size_t page)>;

  FactorSums(const ShardedModel& parameters, const PageUpdates& updates, GradientOf gradient_of,
             double scale)
      : parameters_(parameters),
        updates_(updates),
        gradient_of_(std::move(gradient_of)),
        scale_(scale) {}

  // of: the same on all ranks.
  void run(const std::vector<Parameter>& of) const;

 private:
  struct Place;

  std::vector<Place> places_of(const std::vector<Parameter>& of) const;
  template <typename Make>
  void make_parts(const std::vector<Place>& places, const at::Tensor& all, const Make& make) const;

  const ShardedModel& parameters_;
  const PageUpdates& updates_;
  const GradientOf gradient_of_;
  const double scale_;
};

}  // namespace zeropage::zero
