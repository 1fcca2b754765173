// What all ranks must have alike from step to step, and whether they have it: how many steps each optimizer has
// made, and with which options.
//
// Hashes of it are told in messages that a step sends anyway (zero/agreement/told.h), so ranks hear for nothing
// whether all have the same:
//
// * at the end of a backward that averages, and of each accumulation;
// * in the sums that an accumulator's step, and a clipping by the norm, exchange;
// * in the texts of a save.
//
// Where hashes differ, ranks tell each other in words, and all throw alike: which rank has what, and what to do.
// Steps that differ are past and throw where they are heard of. The rest counts in the next step, so it throws there,
// if it still differs then. What this rank changed between backward and step() the others hear in a message of its
// own, before the step.
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

#include "zero/agreement/told.h"
#include "zero/pages/parameter_pages.h"

namespace zeropage {

class RankAgreement {
 public:
  explicit RankAgreement(std::shared_ptr<const ParameterPages> pages);
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
    std::function<Told()> told;
    // index: among the parts, which are alike on all ranks too.
    std::function<void(size_t index, Lines& lines)> describe;
  };
  // As long as what it returns lives.
  std::shared_ptr<void> add(Part part);

  // The ranks of an axis hear of each other.
  enum class Axis : uint8_t { kData, kTensor, kPipeline };

  // For a message along an axis.
  Told told() const;
  // What its ranks heard of that. who: "backward()", for errors. Throws where steps differ. Collective over the axis
  // where any differ.
  void hear(Axis axis, const Told& told, const HeardAlike& heard, const std::string& who);
  // The same of the data axis, at the end of a backward. Ranks of a tensor-parallel group have no message there that
  // could take it along, and send one.
  void hear_in_backward(const Told& told, const HeardAlike& heard);

  // Before a step. Throws where what counts in it differs. Collective where it differed when it was heard of last, or
  // has changed here since then.
  void begin_step(const std::string& who);

  // In words, over any ranks of the model; throws on all of them alike where they differ. Collective.
  void settle(const comm::World& ranks, const std::string& who) const;

 private:
  const comm::World* along(Axis axis) const;
  HeardAlike tell(Axis axis, const Told& told, const char* what) const;

  // Constant after construction.
  const std::shared_ptr<const ParameterPages> pages_;
  const bool is_alone_;  // there are no other ranks, or none that say anything

  std::list<Part> parts_;
  Told agreed_;  // when ranks heard last
  std::array<bool, 3> differs_ =
      {};  // by axis: what counts in the next step, when it was heard last
};

}  // namespace zeropage
