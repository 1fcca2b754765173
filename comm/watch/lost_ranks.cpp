#include "comm/watch/lost_ranks.h"

#include <algorithm>

namespace zeropage::comm::detail {
namespace {

// Ranks that are lost are waited for so long where the store does not say why.
constexpr auto kUnexplained = std::chrono::milliseconds(500);

}  // namespace

std::optional<int> LostRanks::first_missed(std::vector<int> lost, const Call& call) {
  if (call.operation == Operation::kPair) {
    const bool has_peer = std::find(lost.begin(), lost.end(), call.peer) != lost.end();
    lost = has_peer ? std::vector<int>{call.peer} : std::vector<int>();
  }
  if (lost.empty()) return std::nullopt;
  const auto texts = store_.read(lost);
  if (!texts) {
    // The server of the store may have ended after the operation too, and then cannot say so.
    if (!unexplained_since_) unexplained_since_ = Clock::now();
    if (Clock::now() < *unexplained_since_ + kUnexplained) return std::nullopt;
    return lost.front();
  }
  unexplained_since_.reset();
  for (size_t index = 0; index < lost.size(); ++index) {
    const auto status = RankStatus::parse(texts->at(index));
    if (!status || !status->has_left_after(call)) return lost[index];
  }
  return std::nullopt;
}

}  // namespace zeropage::comm::detail
