// Which tensors of a source are which of a module, and what does not fit.
//
// Lifetime: within those of the source and the options. Throws state::StateError.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zeropage/saving.h"

namespace zeropage::saving {

class WeightMatching {
 public:
  // names, prefix: as of ModuleLoadOptions.
  WeightMatching(const WeightsSource& source, const std::map<std::string, std::string>& names,
                 const std::string& prefix);

  // The entry of a tensor that has these names in the module. Null: there is none, or it does not fit; the report, or
  // unfit(), then has it.
  const WeightsSource::Entry* match(const std::vector<std::string>& names, at::IntArrayRef sizes,
                                    at::ScalarType dtype);

  // What is missing and unexpected of what was matched so far.
  ModuleLoadReport report() const;
  const std::vector<std::string>& unfit() const { return unfit_; }
  // Throws one error with all names for what is unfit and, if strict, for what the report has.
  void check(const ModuleLoadReport& report, bool strict) const;

 private:
  const WeightsSource::Entry* find(const std::string& name) const;
  std::string name_in_source(const std::string& name) const;
  bool fits(const std::string& name, at::IntArrayRef sizes, at::ScalarType dtype,
            const WeightsSource::Entry& entry);

  const WeightsSource& source_;
  const std::map<std::string, std::string>& names_;
  const std::string& prefix_;
  const std::map<std::string, std::string> aliases_;
  std::unordered_map<std::string, const WeightsSource::Entry*> by_name_;
  std::set<std::string> left_;
  std::vector<std::string> missing_;
  std::vector<std::string> unfit_;
};

}  // namespace zeropage::saving
