// What all ranks must have alike from step to step, and whether they have it: how many steps each optimizer has
// made, with which options, and the values of parameters that several ranks have.
//
// Hashes of it are sent in messages that a step sends anyway (zero/agreement/agreement_hashes.h), so ranks hear for nothing
// whether all have the same:
//
// * at the end of a backward that averages, and of each accumulation;
// * in the sums that an accumulator's step, and a clipping by the norm, exchange;
// * in the texts of a save.
//
// Where hashes differ, ranks tell each other in words, and all throw alike: which rank has what, and what to do.
// Steps that differ are past and throw where they are heard of. The rest counts in the next step: scripts may write
// other values on each rank for the time of a backward, and put them back. So it throws in the step, if it still differs
// then, or in the next backward, where no optimizer of ours steps. What this rank changed between backward and step()
// the others hear in a message of its own, before the step.
//
// Lifetime: shares the pages. Threads: the training thread, or the one that runs backward.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "zero/agreement/agreement_hashes.h"
#include "zero/pages/page_writes.h"
#include "zero/pages/parameter_pages.h"

namespace zeropage::zero {

class RankAgreement {
 public:
  RankAgreement(std::shared_ptr<const ParameterPages> pages, std::shared_ptr<PageWrites> writes);
  RankAgreement(const RankAgreement&) = delete;
  RankAgreement& operator=(const RankAgreement&) = delete;

  enum class Kind : uint8_t { kSteps, kSettings, kValues };
  // "lr of parameter group 0", "0.1".
  struct Line {
    Kind kind;
    std::string what;
    std::string has;
  };
  using Lines = std::vector<Line>;

  // What a part of this rank must have alike.
  struct Part {
    std::function<AgreementHashes()> own_hashes;
    // index: among the parts, which are alike on all ranks too.
    std::function<void(size_t index, Lines& lines)> describe;
  };
  // In force as long as what it returns lives.
  std::shared_ptr<void> add(Part part);

  // The ranks of an axis hear of each other.
  enum class Axis : uint8_t { kData, kExperts, kTensor, kPipeline };

  // Before the first gradient of a backward. reduces: it ends with a message that takes told() along. Throws where
  // what counted in a step that never came still differs. Collective where it differed.
  void begin_backward(bool reduces);

  // For a message along an axis: with values as they were when the backward began.
  AgreementHashes own_hashes(Axis axis = Axis::kData) const;
  // For a state: with values as they are now.
  AgreementHashes hashes_now();
  // What the ranks heard at the end of a backward, along the data axis. Throws where steps differ. Ranks of a
  // tensor-parallel group have no message there that could take theirs along, and send one. Collective where any differ.
  void take_backward_result(const AgreementHashes& own_hashes, const AgreementResult& agreed_on);
  // The same of steps and settings, along an axis. who: for errors.
  void take_result(Axis axis, const AgreementHashes& own_hashes, const AgreementResult& agreed_on,
                   const std::string& who);

  // Before a step. Throws where what counts in it differs. Collective where it differed when it was heard of last, or
  // has changed here since then.
  void begin_step(const std::string& who);

  // In words, over any ranks of the model; throws on all of them alike where they differ. Collective.
  void settle(const comm::World& ranks, const std::string& who);

 private:
  const comm::World* along(Axis axis) const;
  AgreementResult tell(Axis axis, const AgreementHashes& own_hashes, const char* what) const;
  void settle_what_differs(const std::string& who);
  uint64_t settings() const { return own_hashes().settings; }

  // Constant after construction.
  const std::shared_ptr<const ParameterPages> pages_;
  const std::shared_ptr<PageWrites> writes_;
  const bool is_alone_;  // there are no other ranks, or none that say anything

  std::list<Part> parts_;
  uint64_t backwards_ = 0;        // that reduced: the number of the sample
  UserWrites::Hashes values_;     // when the last of them began
  uint64_t agreed_settings_ = 0;  // when ranks heard last
  // By axis, what was heard to differ last of what counts in the next step.
  std::array<AgreementResult, 4> results_ = {};
};

}  // namespace zeropage::zero
