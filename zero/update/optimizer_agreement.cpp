#include "zero/update/optimizer_agreement.h"

#include <utility>

namespace zeropage::zero {

OptimizerAgreement::OptimizerAgreement(std::shared_ptr<RankAgreement> ranks,
                                       const ParameterGroups& groups, std::string class_name,
                                       OptionsClass options)
    : ranks_(std::move(ranks)),
      groups_(groups),
      class_name_(std::move(class_name)),
      options_(options),
      part_(ranks_->add(
          {.own_hashes = [this] { return own_hashes(); },
           .describe = [this](size_t index, auto& lines) { describe(index, lines); }})) {}

void OptimizerAgreement::begin_step() {
  ranks_->begin_step("step()");
  ++steps_;
}

AgreementHashes OptimizerAgreement::own_hashes() {
  of_groups_.resize(groups_.size());
  Fingerprint settings;
  for (size_t group = 0; group < groups_.size(); ++group) {
    settings.add(of_groups_[group].of(groups_.options(group), options_));
  }
  return {.steps = static_cast<uint64_t>(steps_), .settings = settings.value()};
}

void OptimizerAgreement::describe(size_t index, RankAgreement::Lines& lines) const {
  using Kind = RankAgreement::Kind;
  const std::string who = c10::str("optimizer ", index, " (", class_name_, ")");
  lines.push_back({Kind::kSteps, "steps of " + who, std::to_string(steps_)});
  for (size_t group = 0; group < groups_.size(); ++group) {
    for (const auto& [name, value] : option_words(groups_.options(group))) {
      lines.push_back(
          {Kind::kSettings, c10::str(name, " of parameter group ", group, " of ", who), value});
    }
  }
}

}  // namespace zeropage::zero
