// Steps of an optimizer whose updates read whole tensors (optim/tensor_form.h): the first passes, and what is between them and
// the second ones, which are the pages' own steps.
//
// Pages go in buckets (zero/update/matrix_owners.h). A bucket takes 4 bytes for each element that this rank updates of its
// pages with such parameters; with matrices, as much again for those that the rank owns, and for what it sends and receives.
//
// Three buckets are under way at once: while the matrices of one are transformed, those of the next travel to their owners, and
// the updates of the last one back. So a rank waits for another only where that one is a whole bucket behind.
//
// Lifetime: that of the optimizer, whose groups, updates and algorithm it uses. Threads: the training thread.
// Collective: the constructor, and run() over the ranks that share the pages. Throws for parameters that the form refuses.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "optim/tensor_form.h"
#include "zero/setup/sharded_model.h"
#include "zero/update/matrix_bytes.h"
#include "zero/update/matrix_exchange.h"
#include "zero/update/matrix_owners.h"
#include "zero/update/option_words.h"
#include "zero/update/page_updates.h"
#include "zero/update/parameter_groups.h"
#include "zero/update/tensor_sums.h"

namespace zeropage::zero {

class TensorPasses {
 public:
  TensorPasses(ShardedModel parameters, const ParameterGroups& groups, const PageUpdates& updates,
               const UpdateAlgorithm& algorithm);

  // Takes in groups and pages that are new, and options that were changed. Throws where a group reads something else than
  // when it was made.
  void adopt();

  // Called for each bucket in turn, whose pages are those of PageUpdates::all(), when they can have their second pass.
  // directions: those of each page, undefined where no parameter of it has two passes.
  using SecondPass =
      std::function<void(const MatrixBucket& bucket, const std::vector<Directions>& directions)>;
  // Makes the first passes. The gradients have come. has_gradient: the same on all ranks.
  void run(const HasGradient& has_gradient, const optim::GradientFactors& factors,
           const SecondPass& second_pass);

  // What a step holds at most beyond what persists, on the device of the ranks, without what transforming a matrix takes: the
  // first passes' results, whole matrices, and messages.
  int64_t transient_bytes() const;

 private:
  using OfPage = PageUpdates::OfPage;

  struct BucketUnderWay {
    const MatrixBucket* bucket = nullptr;
    std::vector<at::Tensor> directions = {};  // by page of the bucket
    std::unique_ptr<MatrixExchange> exchange = {};
    TensorSums::UnderWay sums = {};
  };

  // One of PageUpdates::all().
  struct KnownPage {
    bool has_directions = false;
    c10::Device device;  // of the directions
    TensorSums::OfPage sums = {};
  };

  // One whose options were checked, and what they were.
  struct KnownGroup {
    UpdateReads reads = UpdateReads::kElement;
    uint64_t checked = 0;
    OptionsHash hash = {};
  };

  const optim::TensorForm& form() const { return *algorithm_.tensors; }
  const torch::optim::OptimizerOptions& options_of(size_t parameter) const {
    return groups_.options(static_cast<size_t>(group_of_[parameter]));
  }
  UpdateReads reads(size_t parameter) const { return form().reads(options_of(parameter)); }
  at::IntArrayRef sizes_of(size_t parameter) const;
  // In PageUpdates::all().
  size_t place_of(size_t page) const {
    return static_cast<size_t>(updates_.find(page) - updates_.all().data());
  }

  void find_embeddings();
  void check_known();
  void check_new(size_t group);
  void check(size_t group, size_t parameter) const;
  void find_parameters();
  void find_pages();
  void find_buckets();
  int64_t bytes_of_directions(const MatrixBucket& bucket) const;
  MatrixBytes bytes_of_matrices(const MatrixBucket& bucket) const;

  // page: of PageUpdates::all().
  at::Tensor gradient_of(size_t page) const;
  std::vector<at::Tensor> sum_factors(const MatrixBucket& bucket, const HasGradient& has_gradient,
                                      const optim::GradientFactors& factors) const;
  at::Tensor first_pass(size_t page, const at::Tensor& gradient, const HasGradient& has_gradient,
                        const optim::GradientFactors& factors);
  void make_directions(size_t page, const at::Tensor& gradient, const HasGradient& has_gradient,
                       const optim::GradientFactors& factors, const at::Tensor& directions);
  std::unique_ptr<BucketUnderWay> begin(const MatrixBucket& bucket, const HasGradient& has_gradient,
                                        const optim::GradientFactors& factors);
  void finish(BucketUnderWay& under_way, const SecondPass& second_pass);
  std::unique_ptr<MatrixExchange> exchange_of(const BucketUnderWay& under_way,
                                              const HasGradient& has_gradient) const;

  // Parameters of the page of which the update reads sums.
  std::vector<size_t> with_sums(size_t page) const;
  TensorSums::UnderWay start_sums(const MatrixBucket& bucket,
                                  const HasGradient& has_gradient) const;

  const ShardedModel parameters_;
  const ParameterGroups& groups_;
  const PageUpdates& updates_;
  const UpdateAlgorithm& algorithm_;
  optim::Embeddings embeddings_;   // also those of a pipeline's other stages
  std::vector<int64_t> group_of_;  // by parameter; negative: none
  std::vector<KnownGroup> known_groups_;
  std::vector<KnownPage> known_pages_;
  std::vector<MatrixBucket> buckets_;
  TensorSums sums_;  // of the step that is made
};

}  // namespace zeropage::zero
