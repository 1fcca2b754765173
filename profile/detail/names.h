// Texts by number, each once. Not thread-safe.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "zeropage/profile.h"

namespace zeropage::profile::detail {

class Names {
 public:
  Names() { index_of(""); }

  NameIndex index_of(std::string_view name) {
    const auto known = indices_.find(name);
    if (known != indices_.end()) return known->second;
    const auto index = static_cast<NameIndex>(names_.size());
    names_.emplace_back(name);
    indices_.emplace(names_.back(), index);
    return index;
  }

  std::vector<std::string> all() const { return {names_.begin(), names_.end()}; }

 private:
  std::deque<std::string> names_;  // whose texts stay where they are
  std::unordered_map<std::string_view, NameIndex> indices_;
};

}  // namespace zeropage::profile::detail
