#include "saving/detail/weight_matching.h"

#include <c10/util/StringUtil.h>

#include "saving/detail/name_lists.h"
#include "zeropage/saved_state.h"

namespace zeropage::saving {

WeightMatching::WeightMatching(const WeightsSource& source,
                               const std::map<std::string, std::string>& names,
                               const std::string& prefix)
    : source_(source), names_(names), prefix_(prefix), aliases_(source.aliases()) {
  for (const WeightsSource::Entry& entry : source.tensors()) {
    by_name_.emplace(entry.name, &entry);
    left_.insert(entry.name);
  }
}

const WeightsSource::Entry* WeightMatching::find(const std::string& name) const {
  if (const auto stored = by_name_.find(name); stored != by_name_.end()) return stored->second;
  const auto alias = aliases_.find(name);
  if (alias == aliases_.end()) return nullptr;
  const auto stored = by_name_.find(alias->second);
  return stored == by_name_.end() ? nullptr : stored->second;
}

std::string WeightMatching::name_in_source(const std::string& name) const {
  const auto mapped = names_.find(name);
  return prefix_ + (mapped == names_.end() ? name : mapped->second);
}

const WeightsSource::Entry* WeightMatching::match(const std::vector<std::string>& names,
                                                  at::IntArrayRef sizes, at::ScalarType dtype) {
  for (const std::string& own : names) {
    const WeightsSource::Entry* const entry = find(name_in_source(own));
    if (entry == nullptr) continue;
    left_.erase(entry->name);
    // Tied here, and of their own there.
    for (const std::string& other : names) left_.erase(name_in_source(other));
    return fits(names.front(), sizes, dtype, *entry) ? entry : nullptr;
  }
  missing_.push_back(names.front());
  return nullptr;
}

bool WeightMatching::fits(const std::string& name, at::IntArrayRef sizes, at::ScalarType dtype,
                          const WeightsSource::Entry& entry) {
  const bool is_alike = at::isFloatingType(entry.dtype) == at::isFloatingType(dtype);
  if (sizes == at::IntArrayRef(entry.sizes) && is_alike) return true;
  unfit_.push_back(c10::str(name, " (expected ", dtype, " ", sizes, ", got ", entry.dtype, " ",
                            at::IntArrayRef(entry.sizes), ")"));
  return false;
}

ModuleLoadReport WeightMatching::report() const {
  return {.missing = missing_, .unexpected = {left_.begin(), left_.end()}};
}

void WeightMatching::check(const ModuleLoadReport& report, bool strict) const {
  const bool is_whole = report.missing.empty() && report.unexpected.empty();
  if (unfit_.empty() && (!strict || is_whole)) return;
  throw state::StateError(
      source_.name(), 0,
      "the weights are of another module:" + list_of("missing in it", report.missing) +
          list_of("unexpected", report.unexpected) + list_of("of another shape or kind", unfit_) +
          "\nGive names or prefix in the options, or load what is there with strict = false; "
          "shapes must be the module's");
}

}  // namespace zeropage::saving
