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

#include "zero/options.h"
#include "zero/pages/parameter_pages.h"
#include "zero/update/page_update.h"

namespace zeropage {

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

  // Takes in the groups from `first` on, which are new, and returns their parameters. Throws where one
  // is in another group already.
  std::vector<std::vector<size_t>> adopt(size_t first);
  // Whether the parameter is in a group that was adopted.
  bool contain(size_t parameter) const { return grouped_[parameter]; }

  // The group, of these parameters, as far as this rank owns it in that page.
  OwnedGroup owned(size_t page, size_t group, const std::vector<size_t>& parameters) const;

  // Throws where ranks have other groups, options or parameters, or another class. Collective.
  void check_agreement(const std::string& class_name) const;

 private:
  const std::string& name(size_t parameter) const {
    return pages_->parameters()[parameter].parameter.name();
  }

  const std::shared_ptr<const ParameterPages> pages_;
  const Options options_;
  const Groups& groups_;
  std::vector<bool> grouped_;  // by parameter
};

}  // namespace zeropage
