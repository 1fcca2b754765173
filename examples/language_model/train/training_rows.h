// What a model is trained on: rows of tokens with targets, the same on all ranks, in an order that is a function of the seed.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <torch/torch.h>

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
  // Each from 0 to below count(). Threads: one.
  virtual Rows read(const std::vector<int64_t>& rows) const = 0;
};

// Documents behind each other, cut into rows of one length. The last tokens that fill no row are left out.
class PackedRows final : public TrainingRows {
 public:
  // tokens: of all documents; outlives the rows. end: the token that ends a document, and belongs to it. A token then sees its own
  // document only, and the end is not followed by a target. None: all is one document. Throws where there is no row.
  PackedRows(const std::vector<int32_t>& tokens, int64_t length, std::optional<int32_t> end);

  int64_t count() const override { return count_; }
  Rows read(const std::vector<int64_t>& rows) const override;

 private:
  const std::vector<int32_t>& tokens_;
  const int64_t length_;
  const std::optional<int32_t> end_;
  const int64_t count_;
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
