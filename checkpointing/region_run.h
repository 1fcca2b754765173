// The part of checkpoint() that does not depend on its function's type: the first run of a region.
//
// Lifetime: of the first run; what backward needs is kept by the graph.
// Threads and errors: see checkpointing/checkpoint.h.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "checkpointing/region_options.h"

namespace zeropage::checkpointing {

namespace detail {
class Region;
class RegionForward;
}  // namespace detail

class RegionRun {
 public:
  using NextInput = checkpointing::NextInput;

  explicit RegionRun(RegionOptions options);
  ~RegionRun();
  RegionRun(const RegionRun&) = delete;
  RegionRun& operator=(const RegionRun&) = delete;

  // Whether anything would be saved: grad mode is on.
  static bool worth_it();

  void keep_input(const at::Tensor& tensor, const std::string& name);
  // From here on the region runs. again: repeats it.
  void begin(std::function<void(const NextInput&)> again);
  void see_result(const at::Tensor& tensor);
  // It has ended without an error.
  void end();

 private:
  const std::shared_ptr<detail::Region> region_;
  std::unique_ptr<detail::RegionForward> forward_;
};

}  // namespace zeropage::checkpointing
