#include "profile/report/growth.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace zeropage::profile {
namespace {

using Key = std::tuple<uint8_t, uint8_t, NameIndex, NameIndex>;

std::map<Key, std::vector<int64_t>> bytes_by_step(const RankProfile& rank) {
  std::map<Key, std::vector<int64_t>> bytes;
  for (size_t step = 0; step < rank.steps.size(); ++step) {
    for (const Holding& held : rank.steps[step].held) {
      auto& of_key = bytes[{held.account, held.kind, held.owner, held.page}];
      of_key.resize(rank.steps.size());
      of_key[step] = held.bytes;
    }
  }
  return bytes;
}

bool grows(const std::vector<int64_t>& bytes) {
  return std::adjacent_find(bytes.begin(), bytes.end(), std::greater_equal<>()) == bytes.end();
}

}  // namespace

std::string Growth::to_string() const {
  std::string text = "rank " + std::to_string(rank) + " holds " + std::to_string(bytes_per_step()) +
                     " bytes more of " + kind + " on the " + account + " at the end of each step";
  text += owner.empty() ? std::string(", allocated outside of all operators")
                        : ", allocated by " + owner;
  if (!page.empty()) text += " for page \"" + page + "\"";
  return text + " (" + std::to_string(first_bytes) + " bytes grew to " +
         std::to_string(last_bytes) + " in " + std::to_string(steps) + " steps)";
}

std::vector<Growth> growth_of(const Profile& profile) {
  constexpr size_t kFewestSteps = 3;
  std::vector<Growth> found;
  for (const RankProfile& rank : profile.ranks) {
    if (rank.steps.size() < kFewestSteps) continue;
    for (const auto& [key, bytes] : bytes_by_step(rank)) {
      if (!grows(bytes)) continue;
      const auto [account, kind, owner, page] = key;
      found.push_back({.rank = rank.rank,
                       .account = profile.accounts[account],
                       .kind = profile.kinds[kind],
                       .owner = rank.names[owner],
                       .page = rank.names[page],
                       .first_bytes = bytes.front(),
                       .last_bytes = bytes.back(),
                       .steps = static_cast<int64_t>(bytes.size()) - 1});
    }
  }
  std::stable_sort(found.begin(), found.end(), [](const Growth& a, const Growth& b) {
    return a.bytes_per_step() > b.bytes_per_step();
  });
  return found;
}

}  // namespace zeropage::profile
