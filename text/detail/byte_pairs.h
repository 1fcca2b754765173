// Byte-pair encoding of a word: its bytes are joined pair by pair, the pair of the lowest rank first (the leftmost of several), until no
// pair of the vocabulary is left.
//
// Cost: a word that is a token is looked up; of the others those of up to 64 bytes take a scan for each join, longer ones a heap,
// n log n. Memory: some 30 bytes a token and a merge beside the tokens.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace zeropage::text::detail {

// Two tokens that become a third one. Its rank is its place in the list; of equal pairs the last one counts.
struct Merge {
  int32_t left = 0;
  int32_t right = 0;
  int32_t merged = 0;
};

class BytePairs {
 public:
  struct Options {
    // A word that is a token is taken as it is, even if its pairs would not lead there (ignore_merges).
    bool whole_words = false;
  };
  // tokens: their bytes by number, which must outlive it. is_word: which of them a word may become.
  BytePairs(const std::vector<std::string>& tokens, const std::vector<bool>& is_word,
            const std::vector<Merge>& merges, const Options& options);

  // Appends the tokens of a word. Bytes without a token are left out before pairs are looked for.
  void encode(std::string_view word, std::vector<int32_t>& out) const;

  // The word with these bytes, or -1.
  int32_t find(std::string_view word) const;
  const std::string& missing_bytes() const { return missing_bytes_; }

 private:
  struct Join {
    uint64_t pair = 0;
    uint32_t rank = 0;
    int32_t merged = 0;
  };
  class Chain;

  const Join* join_of(int32_t left, int32_t right) const;
  void join_short(std::vector<int32_t>& tokens, size_t begin) const;
  void join_long(std::vector<int32_t>& tokens, size_t begin) const;
  void append_joined(std::string_view word, std::vector<int32_t>& out) const;

  const std::vector<std::string>& tokens_;
  std::vector<int32_t> byte_tokens_;  // [256], -1 where there is none
  std::string missing_bytes_;
  // Hash tables with open addressing, of a power of two of places.
  std::vector<Join> joins_;
  std::vector<int32_t> places_;  // tokens by their bytes
  std::vector<bool> is_whole_;   // whether a word of a token's bytes is that token
};

}  // namespace zeropage::text::detail
