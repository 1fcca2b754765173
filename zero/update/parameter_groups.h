// Which parameters are in which of an optimizer's groups, and what of a group this rank owns in a page.
//
// The groups are the user's, who may change their options and add some between two steps.
//
// Lifetime: the groups outlive it, and stay where they are. Threads: the training thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/optim/optimizer.h>

#include "zero/pages/parameter_pages.h"
#include "zero/update/page_update.h"
#include "zeropage/options.h"

namespace zeropage::zero {

class ParameterGroups {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  ParameterGroups(std::shared_ptr<const ParameterPages> pages, const Options& options,
                  const Groups& groups);

  size_t size() const { return groups_.size(); }
  const torch::optim::OptimizerOptions& options(size_t group) const {
    return groups_[group].options();
  }
  // Indices of the group's parameters, each once. Throws for a tensor that is no parameter of the model.
  std::vector<size_t> parameters_of(size_t group) const;

  // Takes in the groups from `first` on, which are new. Throws where a parameter of theirs is in another
  // group already.
  void adopt(size_t first);
  // Throws where a group that was adopted is gone, or has other parameters than it had.
  void check_unedited() const;
  // Whether the parameter is in a group that was adopted.
  bool contain(size_t parameter) const { return grouped_[parameter]; }

  struct Member {
    size_t group;
    size_t parameter;
  };
  // The page's parameters that are in groups which were adopted: group by group, each in the user's order.
  const std::vector<Member>& of_page(size_t page) const { return of_pages_[page]; }

  // The groups from `first` on that were adopted, as far as this rank owns any of them in that page.
  std::vector<OwnedGroup> owned(size_t page, size_t first) const;

  // Throws where ranks have other groups, options or parameters, or another class. Collective.
  void check_agreement(const std::string& class_name) const;

 private:
  ParameterShard shard_of(const PlacedParameter& placed, size_t parameter) const;
  void check_ends_agree() const;
  const std::string& name(size_t parameter) const {
    return pages_->parameters()[parameter].parameter.name();
  }

  const std::shared_ptr<const ParameterPages> pages_;
  const Options options_;
  const Groups& groups_;
  std::vector<bool> grouped_;  // by parameter
  // By group that was adopted.
  std::vector<std::vector<const c10::TensorImpl*>> adopted_;
  std::vector<std::vector<Member>> of_pages_;
};

}  // namespace zeropage::zero
