// New values of parameters that a script gives for what each rank owns: those of elements that several ranks own must be
// the same. At stage 0 all ranks own all of a page, with Options::shard_within as many own a shard as there are groups,
// and all ranks of a tensor-parallel group, and the two ends of a pipeline's tied weight, have a whole parameter.
//
// A hash of all goes along in a text that ranks exchange anyway. Where hashes differ, ranks tell each other those of
// each parameter, and all throw alike. Ranks that own other elements are not compared.
//
// Cost: what other ranks own too is read twice.
// Lifetime: shares the pages. Threads: the training thread.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/pages/parameter_pages.h"

namespace zeropage::zero {

class NewValues {
 public:
  // given: by name, [owned numel] of the parameter; undefined where it stays as it is.
  NewValues(const ParameterPages& pages, const std::map<std::string, at::Tensor>& given);

  // For the ranks of the model's world: what they tell each other.
  std::string text() const { return text_of(of_data_); }
  // texts: theirs, by rank. Then over the other axes, in messages of its own. Throws where the values of elements that two
  // ranks own differ. Collective.
  void check_alike(const std::vector<std::string>& texts, const std::string& who) const;

 private:
  struct OfParameter {
    std::string name;
    Range range;        // in the parameter, as it lies in memory
    std::string words;  // of the new values
  };
  using List = std::vector<OfParameter>;

  static std::string text_of(const List& list);
  static void check(const comm::World& ranks, const List& own,
                    const std::vector<std::string>& texts, const std::string& who);

  const ParameterPages& pages_;
  List of_data_, of_experts_, of_tensor_, of_pipeline_;
};

}  // namespace zeropage::zero
