#include "zeropage/data/distributed_sampler.h"

#include <algorithm>
#include <numeric>

#include "zeropage/check.h"
#include "zeropage/data/random.h"

namespace zeropage::data {
namespace {

int64_t saved_number(torch::serialize::InputArchive& archive, const char* key) {
  c10::IValue value;
  archive.read(key, value);
  return value.toInt();
}

}  // namespace

DistributedSampler::DistributedSampler(int64_t samples, const SamplerOptions& options)
    : samples_(samples), options_(options) {
  ZP_CHECK(samples >= 1, "DistributedSampler: expected at least one sample, got ", samples);
  ZP_CHECK(options.batch >= 1, "DistributedSampler: expected a batch of at least 1, got ",
           options.batch);
  ZP_CHECK(options.rank >= 0 && options.rank < options.ranks,
           "DistributedSampler: there is no rank ", options.rank, " of ", options.ranks);
  ZP_CHECK(options.last == LastBatch::kShared || samples >= global_batch(),
           "DistributedSampler: ", samples, " samples do not fill a batch of ", options.batch,
           " on ", options.ranks,
           " ranks, and LastBatch::kDropped drops them all; use a batch of at most ",
           samples / options.ranks, ", or LastBatch::kShared");
  begin(0, 0);
}

std::vector<int64_t> DistributedSampler::order_of(int64_t epoch) const {
  if (options_.order == Order::kShuffled) return permutation(samples_, options_.seed, epoch);
  std::vector<int64_t> order(static_cast<size_t>(samples_));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

void DistributedSampler::begin(int64_t epoch, int64_t position) {
  if (!order_ || (epoch != epoch_ && options_.order == Order::kShuffled)) {
    order_ = std::make_shared<const std::vector<int64_t>>(order_of(epoch));
  }
  epoch_ = epoch;
  position_ = position;
  has_ended_ = false;
}

void DistributedSampler::set_epoch(int64_t epoch) {
  ZP_CHECK(epoch >= 0, "DistributedSampler::set_epoch(): expected 0 or more, got ", epoch);
  if (epoch != epoch_) begin(epoch, 0);
}

void DistributedSampler::restart() {
  begin(epoch_, 0);
}

std::optional<std::vector<int64_t>> DistributedSampler::next() {
  ZP_CHECK(!has_ended_, "DistributedSampler: epoch ", epoch_, " has ended; call set_epoch(",
           epoch_ + 1, ") for the next one, or restart() for the same again");
  const int64_t left = samples_ - position_;
  if (left == 0 || (options_.last == LastBatch::kDropped && left < global_batch())) {
    has_ended_ = true;
    return std::nullopt;
  }
  const int64_t together = std::min(left, global_batch());
  const auto cut = [&](int64_t rank) { return position_ + together * rank / options_.ranks; };
  const auto first = order_->begin() + cut(options_.rank),
             end = order_->begin() + cut(options_.rank + 1);
  position_ += together;
  return std::vector<int64_t>(first, end);
}

int64_t DistributedSampler::batches() const {
  const int64_t dropped = options_.last == LastBatch::kShared ? global_batch() - 1 : 0;
  return (samples_ + dropped) / global_batch();
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("samples", c10::IValue(samples_));
  archive.write("seed", c10::IValue(static_cast<int64_t>(options_.seed)));
  archive.write("shuffled", c10::IValue(options_.order == Order::kShuffled));
  archive.write("epoch", c10::IValue(epoch_));
  archive.write("position", c10::IValue(position_));
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  const int64_t samples = saved_number(archive, "samples");
  ZP_CHECK(samples == samples_, "DistributedSampler: the state is of ", samples,
           " samples, this data set has ", samples_, "; resume with the same data");
  const auto seed = static_cast<uint64_t>(saved_number(archive, "seed"));
  c10::IValue shuffled;
  archive.read("shuffled", shuffled);
  const bool is_shuffled = options_.order == Order::kShuffled;
  ZP_CHECK(seed == options_.seed && shuffled.toBool() == is_shuffled,
           "DistributedSampler: the state has seed ", seed, " and ",
           shuffled.toBool() ? "shuffles" : "does not shuffle", ", this sampler has seed ",
           options_.seed, " and ", is_shuffled ? "shuffles" : "does not shuffle",
           "; resume with the same, as samples would come twice or never");
  const int64_t epoch = saved_number(archive, "epoch"),
                position = saved_number(archive, "position");
  ZP_CHECK(epoch >= 0 && position >= 0 && position <= samples_,
           "DistributedSampler: the state is at sample ", position, " of epoch ", epoch,
           "; expected 0 to ", samples_, "; it is damaged");
  begin(epoch, position);
}

}  // namespace zeropage::data
