#include "language_model/data/rows.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

#include "language_model/model/layers.h"

namespace language_model {

int64_t Rows::learned() const {
  return targets.ne(kIgnored).sum().item<int64_t>();
}

Rows RowRange::read(const std::vector<int64_t>& rows) const {
  std::vector<int64_t> of_all;
  for (const int64_t row : rows) of_all.push_back(begin_ + row);
  return rows_.read(of_all);
}

TokenText TokenText::of(std::vector<int32_t> tokens) {
  const auto kept = std::make_shared<const std::vector<int32_t>>(std::move(tokens));
  return {.numel = static_cast<int64_t>(kept->size()),
          .read = [kept](int64_t first, int64_t count, int64_t* out) {
            std::copy_n(kept->begin() + first, count, out);
          }};
}

TokenText TokenText::of(std::shared_ptr<const zeropage::text::TokenFile> file) {
  const int64_t numel = file->numel();
  return {.numel = numel,
          .read = [file = std::move(file)](int64_t first, int64_t count, int64_t* out) {
            file->read(first, count, out);
          }};
}

PackedRows::PackedRows(TokenText text, int64_t length, std::optional<DocumentMark> mark)
    : text_(std::move(text)),
      length_(length),
      mark_(mark),
      // A row's last target is the first token of the next.
      count_((text_.numel - 1) / length) {
  TORCH_CHECK(count_ > 0, "the text has ", text_.numel, " tokens, and a row ", length,
              " and a target behind them; give more text, or shorter rows");
}

Rows PackedRows::read(const std::vector<int64_t>& rows) const {
  const auto count = static_cast<int64_t>(rows.size());
  const torch::Tensor all = torch::empty({count, length_ + 1}, torch::kLong);
  for (int64_t i = 0; i < count; ++i) {
    text_.read(rows[static_cast<size_t>(i)] * length_, length_ + 1,
               all.mutable_data_ptr<int64_t>() + i * (length_ + 1));
  }
  Rows read{.tokens = all.slice(1, 0, -1).contiguous(), .targets = all.slice(1, 1).clone()};
  if (!mark_) return read;
  const torch::Tensor is_mark = read.tokens.eq(mark_->token);
  read.documents = is_mark.cumsum(1);
  if (mark_->is_first) {
    read.targets.masked_fill_(read.targets.eq(mark_->token), kIgnored);
  } else {
    read.targets.masked_fill_(is_mark, kIgnored);
    read.documents -= is_mark.to(torch::kLong);
  }
  return read;
}

ChatRows::ChatRows(std::vector<zeropage::text::ChatExample> examples, int64_t length,
                   const std::string& name)
    : examples_(std::move(examples)), length_(length) {
  TORCH_CHECK(!examples_.empty(), name, ": has no example");
  int64_t too_long = 0;
  size_t longest = 0;
  int64_t in_row = length;  // of the row so far
  for (size_t i = 0; i < examples_.size(); ++i) {
    const auto numel = static_cast<int64_t>(examples_[i].tokens.size());
    if (numel > length && ++too_long == 1) longest = i;
    if (in_row + numel > length) {
      first_.push_back(i);
      in_row = 0;
    }
    in_row += numel;
  }
  first_.push_back(examples_.size());
  TORCH_CHECK(too_long == 0, name, ": ", too_long, " of ", examples_.size(),
              " examples are longer than a row of ", length, " tokens, the first in line ",
              examples_[longest].line, " with ", examples_[longest].tokens.size(),
              "; give longer rows, or take them out");
}

Rows ChatRows::read(const std::vector<int64_t>& rows) const {
  const auto count = static_cast<int64_t>(rows.size());
  Rows read{.tokens = torch::zeros({count, length_}, torch::kLong),
            .targets = torch::full({count, length_}, kIgnored, torch::kLong),
            // What is left of a row is a document of its own.
            .documents = torch::full({count, length_}, -1, torch::kLong)};
  for (int64_t i = 0; i < count; ++i) {
    const auto row = static_cast<size_t>(rows[static_cast<size_t>(i)]);
    int64_t at = i * length_;
    for (size_t example = first_[row]; example < first_[row + 1]; ++example) {
      const auto& [tokens, learned, line] = examples_[example];
      for (size_t j = 0; j < tokens.size(); ++j, ++at) {
        read.tokens.mutable_data_ptr<int64_t>()[at] = tokens[j];
        read.documents.mutable_data_ptr<int64_t>()[at] =
            static_cast<int64_t>(example - first_[row]);
        if (j + 1 < tokens.size() && learned[j + 1] != 0) {
          read.targets.mutable_data_ptr<int64_t>()[at] = tokens[j + 1];
        }
      }
    }
  }
  return read;
}

int64_t RowOrder::row(int64_t place) {
  const int64_t epoch = place / rows_;
  if (epoch != epoch_) {
    order_.resize(static_cast<size_t>(rows_));
    std::iota(order_.begin(), order_.end(), 0);
    std::seed_seq seeds{seed_, static_cast<uint64_t>(epoch)};
    std::mt19937_64 random(seeds);
    // std::shuffle is another one with each library.
    for (size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[random() % i]);
    epoch_ = epoch;
  }
  return order_[static_cast<size_t>(place % rows_)];
}

}  // namespace language_model
