#include "language_model/train/training_rows.h"

#include <numeric>
#include <random>

#include "language_model/model/layers.h"

namespace language_model {

int64_t Rows::learned() const {
  return targets.ne(kIgnored).sum().item<int64_t>();
}

PackedRows::PackedRows(const std::vector<int32_t>& tokens, int64_t length,
                       std::optional<int32_t> end)
    : tokens_(tokens),
      length_(length),
      end_(end),
      // A row's last target is the first token of the next.
      count_((static_cast<int64_t>(tokens.size()) - 1) / length) {
  TORCH_CHECK(count_ > 0, "the text has ", tokens.size(), " tokens, and a row ", length,
              " and a target behind them; give more text, or shorter rows");
}

Rows PackedRows::read(const std::vector<int64_t>& rows) const {
  const auto count = static_cast<int64_t>(rows.size());
  torch::Tensor all = torch::empty({count, length_ + 1}, torch::kLong);
  for (int64_t i = 0; i < count; ++i) {
    const int32_t* const begin = tokens_.data() + rows[static_cast<size_t>(i)] * length_;
    int64_t* const to = all.mutable_data_ptr<int64_t>() + i * (length_ + 1);
    std::copy(begin, begin + length_ + 1, to);
  }
  Rows read{.tokens = all.slice(1, 0, -1).contiguous(), .targets = all.slice(1, 1).clone()};
  if (!end_) return read;
  const torch::Tensor is_end = read.tokens.eq(*end_);
  read.targets.masked_fill_(is_end, kIgnored);
  read.documents = is_end.cumsum(1) - is_end.to(torch::kLong);
  return read;
}

int64_t RowOrder::row(int64_t place) {
  const int64_t epoch = place / rows_;
  if (epoch != epoch_) {
    order_.resize(static_cast<size_t>(rows_));
    std::iota(order_.begin(), order_.end(), 0);
    std::seed_seq seeds{static_cast<uint64_t>(seed_), static_cast<uint64_t>(epoch)};
    std::mt19937_64 random(seeds);
    // std::shuffle is another one with each library.
    for (size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[random() % i]);
    epoch_ = epoch;
  }
  return order_[static_cast<size_t>(place % rows_)];
}

}  // namespace language_model
