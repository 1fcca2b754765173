#include "parallel/context/ring.h"

#include <optional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "parallel/context/chunks.h"
#include "parallel/stamp.h"

namespace zeropage::parallel::context {
namespace {

// A rank's tensors on their way to its neighbour, beside what is computed meanwhile.
class Turn {
 public:
  // Sends `given` to the next rank and gets as much from the one before. Every second rank receives first, so that nobody
  // waits for a rank that waits.
  Turn(const at::Tensor& given, const comm::World& world, const std::string& name)
      : given_(given), received_(at::empty_like(given)) {
    const int ranks = world.size();
    const int to = (world.rank() + 1) % ranks;
    const int from = (world.rank() + ranks - 1) % ranks;
    comm::Communicator& communicator = world.communicator();
    const at::Tensor sent = given_.view(-1);
    const at::Tensor got = received_.view(-1);
    if (world.rank() % 2 == 0) {
      first_ = communicator.send(sent, to, name);
      second_ = communicator.recv(got, from, name);
    } else {
      first_ = communicator.recv(got, from, name);
      second_ = communicator.send(sent, to, name);
    }
  }

  at::Tensor wait() {
    first_.wait();
    second_.wait();
    return received_;
  }

 private:
  const at::Tensor given_;
  const at::Tensor received_;
  comm::Pending first_, second_;
};

// Keys and values, as they travel: [2, batch, heads, length, size], and a stamp.
class KeyBlock {
 public:
  KeyBlock(const at::Tensor& key, const at::Tensor& value, const Stamp& stamp)
      : KeyBlock(at::empty({2 * key.numel() + Stamp::numel(key.scalar_type())}, key.options()),
                 key.sizes()) {
    this->key().copy_(key);
    this->value().copy_(value);
    stamp.put(message_);
  }
  KeyBlock(at::Tensor message, at::IntArrayRef sizes)
      : message_(std::move(message)), sizes_(sizes.vec()) {}

  const at::Tensor& message() const { return message_; }
  at::Tensor key() const { return part(0); }
  at::Tensor value() const { return part(1); }

 private:
  at::Tensor part(int64_t which) const {
    const int64_t numel = c10::multiply_integers(sizes_);
    return message_.narrow(0, which * numel, numel).view(sizes_);
  }

  at::Tensor message_;
  std::vector<int64_t> sizes_;
};

// Whose block a rank has after so many turns.
int owner_after(int turns, const comm::World& world) {
  return (world.rank() + world.size() - turns) % world.size();
}

// The parts of queries and keys that meet, and how.
class Meeting {
 public:
  Meeting(const at::Tensor& query, int of_rank, const RingOptions& options,
          const comm::World& world)
      : block_(block_of(world.rank(), of_rank, query.size(2), options.is_causal)) {
    form_.scale = options.scale;
    form_.is_diagonal = block_.is_diagonal;
    if (!options.documents.defined()) return;
    const at::Tensor own = of_queries(options.documents[world.rank()], /*dim=*/1);
    const at::Tensor theirs = of_keys(options.documents[of_rank], /*dim=*/1);
    form_.allowed = (own.unsqueeze(2) == theirs.unsqueeze(1)).unsqueeze(1);
  }

  const Block& block() const { return block_; }
  const Form& form() const { return form_; }
  at::Tensor of_queries(const at::Tensor& all, int64_t dim = 2) const {
    return all.narrow(dim, block_.first_query, block_.queries);
  }
  at::Tensor of_keys(const at::Tensor& all, int64_t dim = 2) const {
    return all.narrow(dim, 0, block_.keys);
  }

 private:
  const Block block_;
  Form form_;
};

// Calls visit(meeting, keys, values) with each rank's block as it comes around, while the next one is on its way. keys, values: that
// meet this rank's queries, repeated for their heads. Returns what came with the blocks, to be compared.
template <typename Visit>
Stamp go_around(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                const RingOptions& options, const comm::World& world, const std::string& name,
                const Visit& visit) {
  Stamp stamp(name);
  KeyBlock block(key, value, stamp);
  for (int turns = 0; turns < world.size(); ++turns) {
    std::optional<Turn> turn;
    if (turns + 1 < world.size()) turn.emplace(block.message(), world, name);
    const Meeting meeting(query, owner_after(turns, world), options, world);
    const auto meet = [&](const at::Tensor& all) {
      return repeat_heads(meeting.of_keys(all), query.size(1));
    };
    visit(meeting, meet(block.key()), meet(block.value()));
    if (!turn) break;
    block = KeyBlock(turn->wait(), key.sizes());
    stamp.note(block.message(), owner_after(turns + 1, world));
  }
  return stamp;
}

}  // namespace

Attended ring_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                        const RingOptions& options, const comm::World& world,
                        const std::string& name) {
  MergedAttention merged(query);
  go_around(query, key, value, options, world, name,
            [&](const Meeting& meeting, const at::Tensor& keys, const at::Tensor& values) {
              merged.add(attend(meeting.of_queries(query), keys, values, meeting.form()),
                         meeting.block().first_query);
            })
      .check(world, kOtherAttention);
  return merged.whole();
}

// The gradients of a block follow it by one turn: each rank adds its part, and the last one sends them home.
AttentionGradients ring_attention_backward(const at::Tensor& gradient, const at::Tensor& query,
                                           const at::Tensor& key, const at::Tensor& value,
                                           const Attended& whole, const RingOptions& options,
                                           const comm::World& world, const std::string& name) {
  const at::TensorOptions merged = query.options().dtype(merged_dtype(query.scalar_type()));
  const at::Tensor of_query = at::zeros(query.sizes(), merged);
  std::vector<int64_t> of_both = {2};
  of_both.insert(of_both.end(), key.sizes().begin(), key.sizes().end());
  at::Tensor of_block;
  std::optional<Turn> gradients_turn;
  const Stamp stamp = go_around(
      query, key, value, options, world, name,
      [&](const Meeting& meeting, const at::Tensor& keys, const at::Tensor& values) {
        const AttentionGradients part = attend_backward(
            meeting.of_queries(gradient), meeting.of_queries(query), keys, values,
            {meeting.of_queries(whole.output), meeting.of_queries(whole.log_sum)}, meeting.form());
        meeting.of_queries(of_query).add_(part.query);
        of_block = gradients_turn ? gradients_turn->wait() : at::zeros(of_both, merged);
        const auto add = [&](int64_t which, const at::Tensor& of_keys) {
          meeting.of_keys(of_block[which])
              .add_(sum_repeated(of_keys.to(merged.dtype()), key.size(1)));
        };
        add(0, part.key);
        add(1, part.value);
        if (world.size() > 1) gradients_turn.emplace(of_block, world, name);
      });
  if (gradients_turn) of_block = gradients_turn->wait();
  // Two forwards may go back in another order on another rank.
  stamp.check(world, kOtherAttention);
  return {of_query.to(query.scalar_type()), of_block[0].to(key.scalar_type()),
          of_block[1].to(value.scalar_type())};
}

}  // namespace zeropage::parallel::context
