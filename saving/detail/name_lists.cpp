#include "saving/detail/name_lists.h"

#include <algorithm>

namespace zeropage::saving {
namespace {

constexpr size_t kMostNames = 20;

}  // namespace

std::string list_of(const char* what, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  std::string list = "\n  " + std::to_string(names.size()) + " " + what + ": ";
  for (size_t i = 0; i < std::min(names.size(), kMostNames); ++i) {
    list += (i == 0 ? "" : ", ") + names[i];
  }
  return names.size() > kMostNames ? list + ", ..." : list;
}

}  // namespace zeropage::saving
