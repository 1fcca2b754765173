// What all ranks must have alike from step to step, and whether they have it: how many steps each optimizer has
// made, with which options, and the values of parameters and buffers that several ranks have. Of values, those that scripts
// wrote are compared each time; all there are once in Options::compare_replicas steps, and in saves.
//
// Hashes of it are sent in messages that a step sends anyway (zero/agreement/agreement_hashes.h), so ranks hear for nothing
// whether all have the same:
//
// * at the end of a backward that averages, and of each accumulation;
// * in the sums that an accumulator's step, and a clipping by the norm, exchange;
// * in the texts of a save.
//
// Two groups of ranks have no such message: those that have the same shards (Options::shard_within), and the two stages that
// have a pipeline's tied weight. They send one where all values are compared.
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
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zero/agreement/agreement_hashes.h"
#include "zero/pages/make_pages.h"
#include "zero/pages/replicated_values.h"

namespace zeropage::zero {

class RankAgreement {
 public:
  explicit RankAgreement(const PageParts& parts);
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

  // Values beside parameters, that ranks of the data axis have alike: buffers. Set once, on all ranks alike.
  struct Beside {
    std::function<uint64_t()> hash;
    std::function<void(const TellValues& tell)> describe;
  };
  void compare_beside(Beside beside) { beside_ = std::move(beside); }

  // The ranks of an axis hear of each other. kReplicas: that have the same shards. kTied: stages that have a tied weight.
  enum class Axis : uint8_t { kData, kExperts, kTensor, kPipeline, kReplicas, kTied };

  // What a backward averages, and so ends with a message that takes hashes along.
  enum class Averages : uint8_t {
    kNothing,
    kPartOfStep,  // a micro-step's, and further ones follow
    kStep,
  };
  // Before the first gradient of a backward. Throws where what counted in a step that never came still differs.
  // Collective where it differed.
  void begin_backward(Averages averages);

  // For a message along an axis: with values as they were when the backward began.
  AgreementHashes own_hashes(Axis axis = Axis::kData) const;
  // For a state: with values as they are now.
  AgreementHashes hashes_now();
  // The same of values, by what they are of. Ranks of the model's worlds that have the same key have the same values.
  std::map<std::string, uint64_t> values_now();
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
  uint64_t values_along(Axis axis) const;
  std::optional<ReplicatedValues::Hashes> all_values() const;
  void compare_tied(const std::string& who);
  int64_t steps_made() const;
  std::string after_steps() const;
  AgreementResult tell(Axis axis, const AgreementHashes& own_hashes, const char* what) const;
  void settle_what_differs(const std::string& who);
  uint64_t settings() const { return own_hashes().settings; }

  // Constant after construction.
  const std::shared_ptr<const ParameterPages> pages_;
  const std::shared_ptr<PageWrites> writes_;
  const ReplicatedValues replicated_;
  const bool is_alone_;  // there are no other ranks, or none that say anything

  std::list<Part> parts_;
  Beside beside_;
  uint64_t backwards_ = 0;  // that reduced: the number of the sample
  int64_t of_steps_ =
      0;  // those of them that ended a step's: its number where no optimizer of ours counts
  UserWrites::Hashes values_;  // when the last of them began
  // All values then; none where they are not compared in it, or were already.
  std::optional<ReplicatedValues::Hashes> compared_;
  uint64_t agreed_settings_ = 0;  // when ranks heard last
  // By axis, what was heard to differ last of what counts in the next step.
  std::array<AgreementResult, 6> results_ = {};
};

}  // namespace zeropage::zero
