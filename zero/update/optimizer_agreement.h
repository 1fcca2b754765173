// An optimizer's part in what ranks must have alike (zero/agreement/rank_agreement.h): how many steps it has made,
// and the options of its groups.
//
// Lifetime: the groups outlive it, and stay where they are. Threads: the training thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "zero/agreement/rank_agreement.h"
#include "zero/update/option_words.h"
#include "zero/update/parameter_groups.h"

namespace zeropage::zero {

class OptimizerAgreement {
 public:
  OptimizerAgreement(std::shared_ptr<RankAgreement> ranks, const ParameterGroups& groups,
                     std::string class_name, OptionsClass options);
  OptimizerAgreement(const OptimizerAgreement&) = delete;
  OptimizerAgreement& operator=(const OptimizerAgreement&) = delete;

  // Before a step. Throws on all ranks alike where they would make it with other options, or on other values.
  void begin_step();
  // Those that a loaded state has made. On all ranks alike.
  void set_steps(int64_t steps) { steps_ = steps; }

 private:
  AgreementHashes own_hashes();
  void describe(size_t index, RankAgreement::Lines& lines) const;

  const std::shared_ptr<RankAgreement> ranks_;
  const ParameterGroups& groups_;
  const std::string class_name_;
  const OptionsClass options_;
  int64_t steps_ =
      0;  // begun, whether or not a device left one out: the same on ranks that hear of it late
  std::vector<OptionsHash> of_groups_;
  const std::shared_ptr<void> part_;  // last: calls this
};

}  // namespace zeropage::zero
