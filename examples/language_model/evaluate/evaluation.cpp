#include "language_model/evaluate/evaluation.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace language_model {
namespace {

// Windows [first, first + count) of the text: [count, window], the last one padded.
torch::Tensor rows_of(const std::vector<int32_t>& tokens, int64_t window, int64_t first,
                      int64_t count) {
  torch::Tensor rows = torch::full({count, window}, kIgnored, torch::kLong);
  const auto all = static_cast<int64_t>(tokens.size());
  for (int64_t row = 0; row < count; ++row) {
    const int64_t begin = (first + row) * (window - 1);
    const int64_t numel = std::min(window, all - begin);
    rows[row]
        .narrow(0, 0, numel)
        .copy_(torch::from_blob(const_cast<int32_t*>(tokens.data() + begin), {numel}, torch::kInt));
  }
  return rows;
}

// read: rows [first, first + count) of `all`, by which the ranks take turns.
TextLoss shared_loss(WrappedModel& model, int64_t all, int64_t batch,
                     const std::function<Rows(int64_t first, int64_t count)>& read) {
  const torch::NoGradGuard no_grad;
  const bool was_training = model.is_training();
  model.eval();
  const zeropage::comm::World& world = model.world();
  const RowReaders readers(model);
  const int64_t turns = (all + batch * readers.count - 1) / (batch * readers.count);
  double sum = 0, predicted = 0;
  for (int64_t turn = 0; turn < turns; ++turn) {
    // A rank without rows of its own repeats the first: operators on shared parameters are collective.
    const int64_t first = (turn * readers.count + readers.rank) * batch;
    const bool is_own = first < all;
    const Rows rows =
        own_part(model, is_own ? read(first, std::min(batch, all - first)) : read(0, 1));
    const auto weight = static_cast<double>(is_own ? rows.learned() : 0);
    const torch::Tensor loss = model(rows.tokens, rows.targets, rows.documents);
    if (weight > 0) sum += loss.item<double>() * weight;
    predicted += weight;
  }
  model.train(was_training);
  const torch::Tensor sums =
      world.sum(torch::tensor({sum, predicted}, torch::kDouble).to(world.device()));
  return {.loss = (sums[0] / sums[1]).item<double>(), .tokens = sums[1].item<int64_t>()};
}

}  // namespace

double TextLoss::perplexity() const {
  return std::exp(loss);
}

TextLoss evaluate(WrappedModel& model, const std::vector<int32_t>& tokens, int64_t window,
                  int64_t batch) {
  const ModelConfig& config = model->config();
  const auto count = static_cast<int64_t>(tokens.size());
  TORCH_CHECK(count >= 2, "the text has ", count, " tokens; the loss needs two or more");
  const auto [least, most] = std::minmax_element(tokens.begin(), tokens.end());
  TORCH_CHECK(*least >= 0 && *most < config.vocabulary, "the text has token ",
              *least < 0 ? *least : *most, ", and the model's vocabulary ends at ",
              config.vocabulary - 1, "; give the model's own tokenizer");
  TORCH_CHECK(window >= 2 && window <= longest_sequence(config), "windows of ", window,
              " tokens: expected 2 to ", longest_sequence(config),
              ", the model's longest sequence");
  window = std::min(window, count);
  const int64_t windows = (count - 2) / (window - 1) + 1;
  return shared_loss(model, windows, batch, [&](int64_t first, int64_t rows) {
    const torch::Tensor ids = rows_of(tokens, window, first, rows);
    return Rows{.tokens = ids.slice(1, 0, -1).clamp_min(0), .targets = ids.slice(1, 1)};
  });
}

TextLoss evaluate(WrappedModel& model, const TrainingRows& rows, int64_t batch) {
  return shared_loss(model, rows.count(), batch, [&](int64_t first, int64_t count) {
    std::vector<int64_t> chosen(static_cast<size_t>(count));
    std::iota(chosen.begin(), chosen.end(), first);
    return rows.read(chosen);
  });
}

}  // namespace language_model
