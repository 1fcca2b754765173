// The parameters of one rank as pages: flat buffers in which the parameters' storages live.
//
// A parameter stays the tensor that the module holds; only its storage's memory moves into a page,
// so collectives on a page update parameters in place. Storages are moved one page at a time.
//
// Lifetime: a page's buffer lives as long as this object or any parameter in it. Throws on
// parameters that cannot be placed: off the host, overlapping, or with repeated elements.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "comm/world.h"
#include "zero/module_parameters.h"
#include "zero/shard_layout.h"

namespace zeropage {

// What one rank updates of each page. The stage decides (zero/gradient_reduction.h).
enum class Ownership : uint8_t {
  kWholePage,  // all ranks compute the same update
  kShard,      // each rank its shard; the others take it over
};

struct PlacedParameter {
  NamedParameter parameter;
  size_t page = 0;
  // Where the parameter's elements lie in the page, gaps of a strided parameter included.
  Range range;
  // Of its first element.
  int64_t offset = 0;
};

class ParameterPages {
 public:
  struct PageOptions {
    int64_t page_bytes = 0;
    Ownership ownership = Ownership::kWholePage;
  };

  ParameterPages(comm::World world, std::vector<NamedParameter> parameters,
                 const PageOptions& options);

  const comm::World& world() const { return world_; }
  const std::vector<PageLayout>& layouts() const { return layouts_; }
  const std::vector<PlacedParameter>& parameters() const { return parameters_; }

  // Index into parameters() of a tensor, or -1 if it is none of them.
  int64_t index_of(const at::Tensor& tensor) const;

  // The page's buffer. [layout.padded_numel(world size)]
  const at::Tensor& flat(size_t page) const { return flats_[page]; }
  // What this rank updates.
  Range owned(size_t page) const;

  // Every rank takes rank 0's values. Collective.
  void broadcast_from_rank_zero();
  // Sends what this rank owns to the others, in place. Nothing to do where each rank updates whole
  // pages. Collective.
  comm::Pending start_gather(size_t page) const;

  // Throws if a parameter no longer lives in its page or changed requires_grad since: who replaced
  // it must wrap anew.
  void check_parameters_are_in_place() const;

 private:
  void check(const NamedParameter& named) const;
  std::vector<StorageSpec> group_by_storage();
  void check_no_overlap(const std::vector<size_t>& sharing) const;
  void place(const std::vector<StorageSpec>& storages, const PageOptions& options);

  // Constant after construction.
  const comm::World world_;
  const Ownership ownership_;
  std::vector<PageLayout> layouts_;
  std::vector<PlacedParameter> parameters_;
  std::vector<std::vector<size_t>> parameters_of_storage_;  // by index of StorageSpec
  std::vector<at::Tensor> flats_;                           // each [padded_numel]
};

}  // namespace zeropage
