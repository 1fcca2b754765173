#include "bench/train_gpt/checkpoint_flags.h"

#include <charconv>
#include <string_view>

#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace train_gpt {
namespace {

using zeropage::checkpointing::checkpoint_each;
using zeropage::checkpointing::EveryBlocks;

// What follows the prefix; nothing where the value begins otherwise.
std::optional<std::string> after(std::string_view prefix, std::string_view value) {
  if (!value.starts_with(prefix)) return std::nullopt;
  return std::string(value.substr(prefix.size()));
}

EveryBlocks every_of(const std::string& count) {
  if (count == "sqrt") return EveryBlocks::square_root();
  int64_t blocks = 0;
  const char* end = count.data() + count.size();
  const auto [stopped, error] = std::from_chars(count.data(), end, blocks);
  ZP_CHECK(error == std::errc() && stopped == end && blocks >= 1,
           "--checkpoint-activations every:", count,
           ": expected how many blocks are one region, 1 or more, or every:sqrt");
  return EveryBlocks::every(blocks);
}

int64_t budget_of(const std::string& bytes) {
  int64_t budget = 0;
  try {
    budget = zeropage::memory::parse_bytes(bytes);
  } catch (const std::exception& error) {
    ZP_CHECK(false, "--checkpoint-activations budget:", bytes, ": ",
             zeropage::memory::message_of(error));
  }
  ZP_CHECK(budget >= 1, "--checkpoint-activations budget:", bytes, ": expected 1 byte or more");
  return budget;
}

}  // namespace

void CheckpointFlags::parse_policy(const std::string& value) {
  text = value;
  policy = Policy::kBlocks;
  every = EveryBlocks::none();
  if (value == "none") return;
  if (value == "blocks") {
    every = EveryBlocks::each();
  } else if (const auto count = after("every:", value)) {
    every = every_of(*count);
  } else if (value == "selective") {
    policy = Policy::kSelective;
  } else if (const auto bytes = after("budget:", value)) {
    policy = Policy::kBudget;
    budget_bytes = budget_of(*bytes);
  } else {
    ZP_CHECK(false, "--checkpoint-activations ", value,
             ": expected none, blocks, every:K, every:sqrt, selective or budget:BYTES");
  }
}

void CheckpointFlags::parse_offload(const std::string& value) {
  offload_text = value;
  const auto folder = after("nvme:", value);
  ZP_CHECK(value == "none" || value == "host" || (folder && !folder->empty()),
           "--offload-activations ", value, ": expected none, host or nvme:DIR");
  offload_folder = folder.value_or("");
  offload = folder ? Offload::kFolder : value == "host" ? Offload::kHost : Offload::kNone;
}

void CheckpointFlags::check(int64_t layers) const {
  ZP_CHECK(every.of(layers) <= layers, "--checkpoint-activations ", text,
           ": expected at most the model's ", layers,
           " layers a region; lower it or raise --layers");
}

BlockLoop block_loop(const CheckpointFlags& flags) {
  if (flags.every.of(1) == 0) return nullptr;
  return [every = flags.every](const torch::nn::ModuleList& blocks, torch::Tensor x) {
    return checkpoint_each<Block>(blocks, every, std::move(x));
  };
}

}  // namespace train_gpt
