// The sums behind the norms of gradients (zeropage/gradient_norm.h), over all ranks.
//
// Where parameters are slices (zeropage/parallel_layers.h), the ranks of the tensor-parallel group are asked next.
// Squares of slices add up over the group. What all its ranks have counts once, as its rank 0 has it.
//
// Then the stages of a pipeline are asked. Whether a gradient is not finite there is a flag, since their parameters
// are different ones. A tied weight counts where it is used first. Stages whose gradients a script has clipped one
// by one are
// refused (zero/norms/gradient_scale.h).
//
// They are made where the gradients are: on an accelerator a launch a page adds to words of about a
// kilobyte there (optim/norm_table), which come to page-locked host memory with one copy. What of the
// gradients lies on the host, offloaded or not, is summed there meanwhile.
//
// Tables of the parameters' places are kept: 40 bytes a parameter and group on the device, made anew
// where other parameters have a gradient than the last time.
// The hashes that ranks compare (zero/agreement/rank_agreement.h) are sent along, over all of these ranks.
// Lifetime: shares the pages and the gradients. Threads: the training thread. Collective: sum() and
// start(), of ranks that ask for the same groups.
#pragma once

#include <functional>
#include <future>
#include <map>
#include <memory>
#include <vector>

#include "optim/exact_sum.h"
#include "optim/norm_table.h"
#include "zero/agreement/rank_agreement.h"
#include "zero/gradients/step_gradients.h"
#include "zero/norms/gradient_scale.h"
#include "zero/pages/parameter_pages.h"

namespace zeropage::zero {

struct NormSums {
  std::vector<optim::ExactSum> squares_of_group;
  std::vector<size_t> not_finite;  // parameters, ascending
  optim::ExactSum weight;          // of the ranks'
  bool all_finite = true;          // those of other stages of a pipeline, too
};

class NormSummer {
 public:
  NormSummer(std::shared_ptr<ParameterPages> pages, std::shared_ptr<StepGradients> gradients,
             std::shared_ptr<RankAgreement> agreement);

  // group_of: by parameter, below groups; negative: none, and then it is in no sum. weight: of this
  // rank, and the same on all ranks of a tensor-parallel group, or all throw. The host waits for the
  // gradients. REQUIRES: gradients that are ready for a step.
  NormSums sum(const std::vector<int>& group_of, size_t groups, const optim::ExactSum& weight = {});

  // When a script first looks at the gradients of a step of a pipeline, without which it cannot clip them: sum() then says
  // whether it has multiplied those of the stages by other factors since, as clip_grad_norm_ does that sees one stage.
  void watch_scale() { scale_.note(); }
  bool watches_scale() const { return scale_.is_noted(); }
  // The next gradients are of another step.
  void forget_scale() { scale_.forget(); }

  // For a page whose gradient goes as soon as it is updated: what it returns is called where the gradient is
  // still there, on any thread, and sum() over one group of all parameters waits for that. Until the next
  // call for the page.
  std::function<void(const at::Tensor& gradient)> note_passing(size_t page);
  // For a page that is updated in backward without that: what was noted before is of another step.
  void forget_passing(size_t page) { passed_.erase(page); }

  // The weight alone, between hosts.
  optim::ExactSum sum_weight(const optim::ExactSum& weight) const;

  // Sums that are on their way.
  struct Started {
    // fp32 [1] on the device: 1 where a gradient of any rank is not finite, else 0.
    at::Tensor found_inf;
    // Blocks until they have arrived. Its weight is 0. May be called again.
    std::function<NormSums()> arrived;
  };
  // Whether start() can: all gradients are on an accelerator.
  bool can_start() const;
  // Like sum(), but the host does not wait: ranks exchange their words on the device.
  Started start(const std::vector<int>& group_of, size_t groups);

 private:
  struct OfPage {
    size_t page;
    optim::NormTable table;
  };
  struct Tables {
    std::vector<int> group_of;  // negative without a gradient, too
    optim::NormSizes sizes;
    std::vector<OfPage> of_pages;
  };

  // Slices have sums of their own, behind those of parameters that are whole.
  size_t sums_of(size_t groups) const;
  std::vector<int> slices_apart(std::vector<int> group_of, size_t groups) const;
  std::vector<optim::NormPart> parts_of_page(size_t page, const std::vector<int>& group_of) const;
  void make_tables(const std::vector<int>& group_of, size_t groups);
  bool any_on_device() const;
  void add_own(const at::Tensor& words) const;

  const std::shared_ptr<ParameterPages> pages_;
  const std::shared_ptr<StepGradients> gradients_;
  const std::shared_ptr<RankAgreement> agreement_;
  std::vector<int> one_group() const;
  void check_one_group(const std::vector<int>& group_of) const;

  Tables tables_;  // that were asked for last
  GradientScale scale_;

  struct Passed {
    std::shared_ptr<const optim::NormTable> table;
    std::shared_future<at::Tensor> words;
  };
  std::map<size_t, Passed> passed_;  // by page
};

}  // namespace zeropage::zero
