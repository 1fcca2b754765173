// Which update a page gets: by the class itself, by its fused form, or rounded at random.
//
// Lifetime: shares the pages and the reducer. Threads: the training thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "optim/embeddings.h"
#include "optim/tensor_form.h"
#include "zero/setup/sharded_model.h"
#include "zero/update/class_update.h"
#include "zero/update/option_words.h"
#include "zero/update/page_update.h"

namespace zeropage::zero {

// What is particular to a torch::optim class.
struct UpdateAlgorithm {
  std::string class_name;  // for errors and for comparing ranks
  MakeClassOptimizer make_class_optimizer;
  MakePageUpdate make_fused;  // empty: it has no fused form
  // What is between the two passes of its updates; null: they have one. A class with two has a fused form.
  std::shared_ptr<const optim::TensorForm> tensors = nullptr;
  // The module's, where it is known.
  optim::Embeddings embeddings = {};
  int64_t states = 0;  // that it keeps, of the parameters' size; 0 where that is not known
  OptionsClass options = {};
};

class UpdateFactory {
 public:
  // Throws where the options ask for what the class has not.
  UpdateFactory(ShardedModel parameters, UpdateAlgorithm algorithm)
      : parameters_(std::move(parameters)),
        algorithm_(std::move(algorithm)),
        fused_(updates_fused()) {}

  const UpdateAlgorithm& algorithm() const { return algorithm_; }

  // What this rank owns of the page, where it lies. REQUIRES: the page trains.
  OwnedPart owned_part(size_t page) const;
  // The update of a page whose optimizer is on the device. Throws where the options do not fit its dtype.
  std::unique_ptr<PageUpdate> make(size_t page) const;
  // The update of any other page. REQUIRES: the class has a fused form.
  std::unique_ptr<PageUpdate> make_fused(OwnedPart part) const;

 private:
  const char* what_needs_fused() const;
  bool updates_fused() const;
  bool rounds_stochastically(const PageLayout& layout) const;

  const ShardedModel parameters_;
  const UpdateAlgorithm algorithm_;
  const bool fused_;
};

}  // namespace zeropage::zero
