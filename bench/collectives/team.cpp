#include "bench/collectives/team.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace collectives {
namespace {

using Clock = std::chrono::steady_clock;
using zeropage::comm::ReduceOp;

constexpr const char* kWhat = "the bench";

// A rank's element before the operation: small whole numbers, whose sums fp32 holds exactly.
float given(int64_t index, int64_t rank) {
  return static_cast<float>((index * 7 + rank * 131 + 1) % 1009);
}

float sum_of_given(int64_t index, int ranks) {
  float sum = 0;
  for (int rank = 0; rank < ranks; ++rank) sum += given(index, rank);
  return sum;
}

std::string first_line(const std::exception& error) {
  const std::string message = zeropage::memory::message_of(error);
  return message.substr(0, message.find('\n'));
}

c10::intrusive_ptr<c10d::Store> part_of(const c10::intrusive_ptr<c10d::Store>& store,
                                        const std::string& prefix) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

}  // namespace

Team::Team(const zeropage::comm::Place& place, const c10::intrusive_ptr<c10d::Store>& store,
           const Flags& flags)
    : control_(place, part_of(store, "control"), {.transport = zeropage::comm::Transport::kGloo}) {
  for (const std::string& transport : flags.transports) {
    std::unique_ptr<Backend> backend;
    std::string refusal;
    try {
      backend = make_backend(transport, place, part_of(store, transport));
    } catch (const std::exception& error) {
      refusal = first_line(error);
    }
    const std::vector<std::string> refusals = control_.gather_text(transport, refusal);
    const auto first = std::find_if(refusals.begin(), refusals.end(),
                                    [](const std::string& text) { return !text.empty(); });
    if (first != refusals.end()) {
      absent_.push_back({transport, *first});
      continue;
    }
    transports_.push_back(transport);
    backends_.push_back(std::move(backend));
  }
  const int64_t bytes = *std::max_element(flags.sizes_bytes.begin(), flags.sizes_bytes.end());
  // Written, or the kernel would serve every page of it from one page of zeros.
  tensor_ = at::empty({bytes / kElementBytes}, at::kFloat).fill_(0);
}

void Team::verify(const Case& measured, size_t transport) {
  perform(exchange({Verb::kVerify, measured, transport, 1}));
}

double Team::time(const Case& measured, size_t transport, int64_t iterations) {
  return perform(exchange({Verb::kTime, measured, transport, iterations}));
}

void Team::dismiss() {
  exchange({});
}

void Team::follow() {
  for (;;) {
    const Command command = exchange({});
    if (command.verb == Verb::kDismiss) return;
    perform(command);
  }
}

// Rank 0's command on all ranks.
Team::Command Team::exchange(const Command& command) {
  at::Tensor words = at::tensor(
      {static_cast<int64_t>(command.verb), static_cast<int64_t>(command.measured.operation),
       command.measured.bytes, static_cast<int64_t>(command.transport), command.iterations},
      at::kLong);
  control_.communicator().broadcast(words, /*root=*/0, kWhat).wait();
  const int64_t* const word = words.const_data_ptr<int64_t>();
  return {static_cast<Verb>(word[0]),
          {static_cast<Operation>(word[1]), word[2]},
          static_cast<size_t>(word[3]),
          word[4]};
}

double Team::perform(const Command& command) {
  if (command.verb == Verb::kTime) return time_here(command);
  verify_here(command);
  return 0;
}

double Team::time_here(const Command& command) {
  Backend& backend = *backends_[command.transport];
  Call next = call(command.measured);
  const auto run = [&](int64_t iteration) {
    // A root that stays would run ahead of the others, as far as buffers let it.
    next.root = static_cast<int>(iteration % control_.size());
    backend.run(next);
  };
  // Zeros stay zeros however often they are summed.
  tensor_.fill_(0);
  run(0);
  control_.communicator().barrier(kWhat).wait();
  const auto start = Clock::now();
  for (int64_t iteration = 0; iteration < command.iterations; ++iteration) run(iteration);
  const std::chrono::duration<double> taken = Clock::now() - start;
  const at::Tensor longest = at::tensor({taken.count()}, at::kDouble);
  control_.communicator().all_reduce(longest, ReduceOp::kMax, kWhat).wait();
  return longest.item<double>();
}

void Team::verify_here(const Command& command) {
  const Operation operation = command.measured.operation;
  const int ranks = control_.size();
  const int roots = operation == Operation::kBroadcast ? ranks : 1;
  for (int root = 0; root < roots; ++root) {
    Call once = call(command.measured);
    once.root = root;
    float* const values = once.whole.mutable_data_ptr<float>();
    const int64_t numel = once.whole.numel();
    for (int64_t i = 0; i < numel; ++i) values[i] = given(i, rank());
    backends_[command.transport]->run(once);
    const int64_t slice_numel = numel / ranks;
    // The rest of a reduce_scatter's tensor is each implementation's own affair.
    const bool own_slice = operation == Operation::kReduceScatter;
    const int64_t begin = own_slice ? rank() * slice_numel : 0;
    const int64_t end = own_slice ? begin + slice_numel : numel;
    for (int64_t i = begin; i < end; ++i) {
      const bool reduces = own_slice || operation == Operation::kAllReduce;
      const int giver =
          operation == Operation::kAllGather ? static_cast<int>(i / slice_numel) : root;
      const float wanted = reduces ? sum_of_given(i, ranks) : given(i, giver);
      ZP_CHECK(values[i] == wanted, name(operation), " of ",
               zeropage::memory::format_bytes(command.measured.bytes), " over ",
               transports_[command.transport], ": element ", i, " is ", values[i], ", expected ",
               wanted, "; its figures would mean nothing");
    }
  }
}

Call Team::call(const Case& measured) const {
  const int64_t numel = measured.bytes / kElementBytes;
  const int64_t slice_numel = numel / control_.size();
  const at::Tensor whole = tensor_.narrow(0, 0, numel);
  return {.operation = measured.operation,
          .whole = whole,
          .slice = whole.narrow(0, rank() * slice_numel, slice_numel)};
}

}  // namespace collectives
