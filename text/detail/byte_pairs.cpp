#include "text/detail/byte_pairs.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <queue>
#include <tuple>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace zeropage::text::detail {
namespace {

constexpr size_t kMostScannedTokens = 64;
constexpr uint64_t kNoPair = ~uint64_t{0};
constexpr uint32_t kNoRank = std::numeric_limits<uint32_t>::max();
constexpr uint64_t kGoldenRatio = 0x9E3779B97F4A7C15U;

uint64_t pair_of(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

// Half of a table's places stay empty, so that looking for what is not there ends soon.
size_t places_for(size_t count) {
  return std::bit_ceil(2 * std::max<size_t>(count, 1));
}

size_t place_of_pair(uint64_t pair, size_t places) {
  return (pair * kGoldenRatio >> 20) & (places - 1);
}

size_t place_of_word(std::string_view word, size_t places) {
  return XXH3_64bits(word.data(), word.size()) & (places - 1);
}

}  // namespace

BytePairs::BytePairs(const std::vector<std::string>& tokens, const std::vector<bool>& is_word,
                     const std::vector<Merge>& merges, const Options& options)
    : tokens_(tokens),
      byte_tokens_(256, -1),
      joins_(places_for(merges.size()), Join{.pair = kNoPair}),
      places_(places_for(tokens.size()), -1),
      is_whole_(tokens.size(), options.whole_words) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (!is_word[i]) continue;
    const auto id = static_cast<int32_t>(i);
    if (tokens[i].size() == 1) byte_tokens_[static_cast<uint8_t>(tokens[i][0])] = id;
    size_t place = place_of_word(tokens[i], places_.size());
    while (places_[place] >= 0) place = (place + 1) & (places_.size() - 1);
    places_[place] = id;
  }
  for (int byte = 0; byte < 256; ++byte) {
    if (byte_tokens_[byte] < 0) missing_bytes_ += static_cast<char>(byte);
  }
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const uint64_t pair = pair_of(merges[rank].left, merges[rank].right);
    size_t place = place_of_pair(pair, joins_.size());
    while (joins_[place].pair != kNoPair && joins_[place].pair != pair) {
      place = (place + 1) & (joins_.size() - 1);
    }
    joins_[place] = {pair, static_cast<uint32_t>(rank), merges[rank].merged};
  }
  std::vector<int32_t> joined;
  for (size_t i = 0; i < tokens.size() && !options.whole_words; ++i) {
    joined.clear();
    if (is_word[i]) append_joined(tokens[i], joined);
    is_whole_[i] = joined.size() == 1 && joined[0] == static_cast<int32_t>(i);
  }
}

int32_t BytePairs::find(std::string_view word) const {
  size_t place = place_of_word(word, places_.size());
  while (places_[place] >= 0 && tokens_[static_cast<size_t>(places_[place])] != word) {
    place = (place + 1) & (places_.size() - 1);
  }
  return places_[place];
}

const BytePairs::Join* BytePairs::join_of(int32_t left, int32_t right) const {
  const uint64_t pair = pair_of(left, right);
  size_t place = place_of_pair(pair, joins_.size());
  while (joins_[place].pair != pair) {
    if (joins_[place].pair == kNoPair) return nullptr;
    place = (place + 1) & (joins_.size() - 1);
  }
  return &joins_[place];
}

void BytePairs::encode(std::string_view word, std::vector<int32_t>& out) const {
  const int32_t whole = find(word);
  if (whole >= 0 && is_whole_[static_cast<size_t>(whole)]) {
    out.push_back(whole);
  } else {
    append_joined(word, out);
  }
}

void BytePairs::append_joined(std::string_view word, std::vector<int32_t>& out) const {
  const size_t begin = out.size();
  for (const char byte : word) {
    const int32_t token = byte_tokens_[static_cast<uint8_t>(byte)];
    if (token >= 0) out.push_back(token);
  }
  if (out.size() - begin <= kMostScannedTokens) {
    join_short(out, begin);
  } else {
    join_long(out, begin);
  }
}

void BytePairs::join_short(std::vector<int32_t>& tokens, size_t begin) const {
  int32_t* const token = tokens.data() + begin;
  size_t count = tokens.size() - begin;
  // The rank of each token with the one behind it, and what they become.
  std::array<uint32_t, kMostScannedTokens> ranks;
  std::array<int32_t, kMostScannedTokens> merged;
  const auto look_up = [&](size_t i) {
    const Join* const join = join_of(token[i], token[i + 1]);
    ranks[i] = join == nullptr ? kNoRank : join->rank;
    merged[i] = join == nullptr ? 0 : join->merged;
  };
  for (size_t i = 0; i + 1 < count; ++i) look_up(i);
  while (count > 1) {
    const auto* const lowest = std::min_element(ranks.data(), ranks.data() + count - 1);
    if (*lowest == kNoRank) break;
    const auto at = static_cast<size_t>(lowest - ranks.data());
    token[at] = merged[at];
    std::copy(token + at + 2, token + count, token + at + 1);
    std::copy(ranks.data() + at + 1, ranks.data() + count - 1, ranks.data() + at);
    std::copy(merged.data() + at + 1, merged.data() + count - 1, merged.data() + at);
    --count;
    if (at > 0) look_up(at - 1);
    if (at + 1 < count) look_up(at);
  }
  tokens.resize(begin + count);
}

void BytePairs::join_long(std::vector<int32_t>& tokens, size_t begin) const {
  // A list: what is joined to its left neighbour is -1.
  constexpr size_t kNone = std::numeric_limits<size_t>::max();
  std::vector<int32_t> token(tokens.begin() + static_cast<std::ptrdiff_t>(begin), tokens.end());
  std::vector<size_t> next(token.size());
  std::vector<size_t> previous(token.size());
  using Candidate = std::tuple<uint32_t, size_t, int32_t>;  // rank, place, what it becomes
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates;
  const auto consider = [&](size_t at) {
    if (at == kNone || next[at] == kNone) return;
    const Join* const join = join_of(token[at], token[next[at]]);
    if (join != nullptr) candidates.emplace(join->rank, at, join->merged);
  };
  for (size_t i = 0; i < token.size(); ++i) {
    next[i] = i + 1 < token.size() ? i + 1 : kNone;
    previous[i] = i > 0 ? i - 1 : kNone;
  }
  for (size_t i = 0; i < token.size(); ++i) consider(i);
  while (!candidates.empty()) {
    const auto [rank, at, merged] = candidates.top();
    candidates.pop();
    if (token[at] < 0 || next[at] == kNone) continue;
    const Join* const join = join_of(token[at], token[next[at]]);
    // It was found before one of the two was joined to another.
    if (join == nullptr || join->rank != rank) continue;
    const size_t gone = next[at];
    token[at] = merged;
    token[gone] = -1;
    next[at] = next[gone];
    if (next[at] != kNone) previous[next[at]] = at;
    consider(previous[at]);
    consider(at);
  }
  tokens.resize(begin);
  for (size_t at = 0; at != kNone && !token.empty(); at = next[at]) tokens.push_back(token[at]);
}

}  // namespace zeropage::text::detail
