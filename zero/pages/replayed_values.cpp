#include "zero/pages/replayed_values.h"

#include <iostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "optim/bit_hashes.h"

namespace zeropage::zero {
namespace {

// In place of a hash, where ranks of another world differ.
constexpr const char* kDiffers = "differs";

std::vector<std::string> lines_of_text(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

}  // namespace

void ReplayedValues::note(size_t storage, const at::Tensor& values) {
  hashes_[storage] = optim::bit_hashes({values}).front();
}

std::set<size_t> ReplayedValues::find_differing() const {
  std::set<size_t> differing = find_differing_over(pages_.world(), {});
  const comm::World* const slices = pages_.tensor_world();
  if (slices == nullptr) return differing;
  // Ranks at the same place of other such groups know of the same storages, so all come to one list.
  return find_differing_over(*slices, std::move(differing));
}

std::set<size_t> ReplayedValues::find_differing_over(const comm::World& ranks,
                                                     std::set<size_t> known) const {
  std::string text;
  std::vector<size_t> storages;
  for (const auto& [storage, hash] : hashes_) {
    storages.push_back(storage);
    text += (known.contains(storage) ? kDiffers : std::to_string(hash)) + "\n";
  }
  const auto decide = [&](const std::vector<std::string>& texts) {
    std::vector<std::vector<std::string>> of_ranks;
    for (const std::string& of_rank : texts) of_ranks.push_back(lines_of_text(of_rank));
    std::vector<std::pair<size_t, int>> found;  // a storage, and a rank that has other values
    for (size_t line = 0; line < storages.size(); ++line) {
      for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
        if (of_ranks[rank].at(line) == of_ranks[0][line] && of_ranks[0][line] != kDiffers) continue;
        found.emplace_back(storages[line], static_cast<int>(rank));
        break;
      }
    }
    std::string answer;
    for (const auto& [storage, rank] : found) answer += std::to_string(storage) + "\n";
    if (!found.empty()) tell(ranks, found.front().first, found.front().second, found.size());
    return answer;
  };
  for (const std::string& line : lines_of_text(ranks.settle_difference(
           "the values of a module that was constructed without memory", text, decide))) {
    known.insert(std::stoul(line));
  }
  return known;
}

void ReplayedValues::tell(const comm::World& ranks, size_t storage, int rank, size_t count) const {
  if (rank == 0) return;  // told of in the other world
  const size_t first = pages_.storages()[storage].parameters.front();
  std::cerr << c10::str("zeropage: parameter \"", pages_.parameters()[first].parameter.name(), "\"",
                        count > 1 ? c10::str(" and ", count - 1, " others") : std::string(),
                        " of a module that was constructed without memory: rank ",
                        ranks.global_rank(rank), " computed other values than rank ",
                        ranks.global_rank(0),
                        ", such as by another seed, so rank 0's are sent to all ranks. Seed ranks "
                        "alike before the constructor, and none is sent\n")
            << std::flush;
}

}  // namespace zeropage::zero
