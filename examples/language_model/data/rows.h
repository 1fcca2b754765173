// What a model learns from: rows of tokens with targets, the same on all ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/torch.h>
#include <zeropage/text/chat_examples.h>
#include <zeropage/text/token_file.h>

namespace language_model {

struct Rows {
  torch::Tensor tokens;     // [rows, length] of int64
  torch::Tensor targets;    // [rows, length]; kIgnored where nothing is to be learned
  torch::Tensor documents;  // [rows, length], or undefined: each row is one document

  // Targets that count.
  int64_t learned() const;
};

class TrainingRows {
 public:
  virtual ~TrainingRows() = default;

  virtual int64_t count() const = 0;
  virtual int64_t length() const = 0;
  // Each from 0 to below count(). Threads: any.
  virtual Rows read(const std::vector<int64_t>& rows) const = 0;
};

// Some rows of others, which outlive them.
class RowRange final : public TrainingRows {
 public:
  RowRange(const TrainingRows& rows, int64_t begin, int64_t end)
      : rows_(rows), begin_(begin), end_(end) {}

  int64_t count() const override { return end_ - begin_; }
  int64_t length() const override { return rows_.length(); }
  Rows read(const std::vector<int64_t>& rows) const override;

 private:
  const TrainingRows& rows_;
  const int64_t begin_, end_;
};

// Tokens in memory or in a file.
struct TokenText {
  int64_t numel = 0;
  std::function<void(int64_t first, int64_t count, int64_t* out)> read;

  static TokenText of(std::vector<int32_t> tokens);
  static TokenText of(std::shared_ptr<const zeropage::text::TokenFile> file);
};

// The token between documents: the last of each, or the first. Which of both, the text's first token tells.
struct DocumentMark {
  int32_t token = 0;
  bool is_first = false;
};

// Documents behind each other, cut into rows of one length. The last tokens that fill no row are left out.
class PackedRows final : public TrainingRows {
 public:
  // mark: a token then sees its own document only, and the last of a document has no target. None: all is one document. Throws where
  // there is no row.
  PackedRows(TokenText text, int64_t length, std::optional<DocumentMark> mark);

  int64_t count() const override { return count_; }
  int64_t length() const override { return length_; }
  Rows read(const std::vector<int64_t>& rows) const override;

 private:
  const TokenText text_;
  const int64_t length_;
  const std::optional<DocumentMark> mark_;
  const int64_t count_;
};

// Examples with a mask: as many as fit into a row, in their order. An example is never cut.
class ChatRows final : public TrainingRows {
 public:
  // name: of the file, for errors. Throws for examples that are longer than a row, with their number and the first one's line.
  ChatRows(std::vector<zeropage::text::ChatExample> examples, int64_t length,
           const std::string& name);

  int64_t count() const override { return static_cast<int64_t>(first_.size()) - 1; }
  int64_t length() const override { return length_; }
  Rows read(const std::vector<int64_t>& rows) const override;

 private:
  const std::vector<zeropage::text::ChatExample> examples_;
  const int64_t length_;
  std::vector<size_t> first_;  // by row: its first example; and the end of all
};

// Which rows come when: every row once an epoch, in another order each.
class RowOrder {
 public:
  RowOrder(int64_t rows, uint64_t seed) : rows_(rows), seed_(seed) {}

  // The `place`-th row of the run, from 0 on. Costs 8 bytes a row, and an order for each new epoch.
  int64_t row(int64_t place);

 private:
  const int64_t rows_;
  const uint64_t seed_;
  int64_t epoch_ = -1;  // of `order_`
  std::vector<int64_t> order_;
};

}  // namespace language_model
