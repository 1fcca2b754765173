// Steps of an optimizer whose updates read whole tensors (optim/tensor_form.h): the first passes, and what is between them and
// the second ones, which are the pages' own steps.
//
// Pages go in buckets (zero/update/matrix_owners.h). A bucket takes 4 bytes for each element that this rank updates of its
// pages with such parameters; with matrices, as much again for those that the rank owns, and for what it sends and receives.
//
// Lifetime: that of the optimizer, whose groups, updates and algorithm it uses. Threads: the training thread.
// Collective: the constructor, and make() over the ranks that share the pages. Throws for parameters that the form refuses.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "optim/norm_table.h"
#include "optim/tensor_form.h"
#include "zero/setup/sharded_model.h"
#include "zero/update/matrix_exchange.h"
#include "zero/update/matrix_owners.h"
#include "zero/update/option_words.h"
#include "zero/update/page_updates.h"
#include "zero/update/parameter_groups.h"

namespace zeropage {

class TensorPasses {
 public:
  TensorPasses(ShardedModel parameters, const ParameterGroups& groups, const PageUpdates& updates,
               const UpdateAlgorithm& algorithm);

  // Takes in groups and pages that are new, and options that were changed. Throws where a group reads something else than
  // when it was made.
  void adopt();

  // Their pages are those of PageUpdates::all().
  const std::vector<MatrixBucket>& buckets() const { return buckets_; }

  // Makes the first pass of the bucket's pages; their gradients have come. Returns the directions of each: undefined where no
  // parameter of the page has two passes. has_gradient: the same on all ranks.
  std::vector<Directions> make(const MatrixBucket& bucket, const HasGradient& has_gradient,
                               const offload::GradientFactors& factors);

 private:
  using OfPage = PageUpdates::OfPage;

  // What a page's sums are of: those of parameters[i] are sums i of the table, which lies where the page's directions do.
  struct SumsOfPage {
    std::vector<size_t> parameters;
    std::optional<offload::NormTable> table;  // none: no parameter has sums
  };
  // One of PageUpdates::all().
  struct KnownPage {
    bool has_directions = false;
    c10::Device device;  // of the directions
    SumsOfPage sums = {};
  };

  // One whose options were checked, and what they were.
  struct KnownGroup {
    UpdateReads reads = UpdateReads::kElement;
    uint64_t checked = 0;
    OptionsHash hash = {};
  };

  const offload::TensorForm& form() const { return *algorithm_.tensors; }
  const torch::optim::OptimizerOptions& options_of(size_t parameter) const {
    return groups_.options(static_cast<size_t>(group_of_[parameter]));
  }
  UpdateReads reads(size_t parameter) const { return form().reads(options_of(parameter)); }
  at::IntArrayRef sizes_of(size_t parameter) const;

  void find_embeddings();
  void check_known();
  void check_new(size_t group);
  void check(size_t group, size_t parameter) const;
  void find_parameters();
  void find_pages();
  void find_buckets();

  // page: of PageUpdates::all().
  at::Tensor gradient_of(size_t page) const;
  std::vector<at::Tensor> sum_factors(const MatrixBucket& bucket, const HasGradient& has_gradient,
                                      const offload::GradientFactors& factors) const;
  at::Tensor first_pass(size_t page, const at::Tensor& gradient, const HasGradient& has_gradient,
                        const offload::GradientFactors& factors);
  void make_directions(size_t page, const at::Tensor& gradient, const HasGradient& has_gradient,
                       const offload::GradientFactors& factors, const at::Tensor& directions);
  void exchange(const MatrixBucket& bucket, const HasGradient& has_gradient,
                const std::vector<at::Tensor>& directions) const;

  SumsOfPage sums_of(const OfPage& of_page, const c10::Device& device) const;
  void add_squares(const SumsOfPage& of_page, const at::Tensor& flat,
                   offload::ExactSum offload::TensorForm::Sums::*to);
  void sum_over_ranks(const MatrixBucket& bucket, const HasGradient& has_gradient);

  const ShardedModel parameters_;
  const ParameterGroups& groups_;
  const PageUpdates& updates_;
  const UpdateAlgorithm& algorithm_;
  offload::Embeddings embeddings_;  // also those of a pipeline's other stages
  std::vector<int64_t> group_of_;   // by parameter; negative: none
  std::vector<KnownGroup> known_groups_;
  std::vector<KnownPage> known_pages_;
  std::vector<MatrixBucket> buckets_;
  std::vector<offload::TensorForm::Sums> sums_;  // by parameter, of the step that is made
};

}  // namespace zeropage
