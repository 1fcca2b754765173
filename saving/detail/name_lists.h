// Names in errors: of what a model has and a file lacks, and the other way round.
#pragma once

#include <string>
#include <vector>

namespace zeropage::saving {

// "" for none, else a line "\n  3 missing in it: a, b, c": the first twenty.
std::string list_of(const char* what, const std::vector<std::string>& names);

}  // namespace zeropage::saving
