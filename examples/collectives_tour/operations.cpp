#include "collectives_tour/operations.h"

#include <chrono>
#include <thread>

namespace collectives_tour {
namespace {

using zeropage::World;
using zeropage::comm::ReduceOp;

constexpr int kRoot = 0;

// [numel] on the host: what rank r begins with.
torch::Tensor values_of(int rank, int64_t numel) {
  return torch::arange(numel, torch::kFloat) + 10 * rank;
}

// [ranks]: the sums of all ranks' elements.
torch::Tensor sums(const World& world) {
  torch::Tensor sum = torch::zeros({world.size()});
  for (int rank = 0; rank < world.size(); ++rank) sum += values_of(rank, world.size());
  return sum;
}

// [ranks]: the first elements of all ranks.
torch::Tensor firsts(const World& world) {
  return torch::arange(world.size(), torch::kFloat) * 10;
}

torch::Tensor filled_at(const World& world, int64_t place, float value) {
  torch::Tensor tensor = torch::full({world.size()}, kNothing);
  tensor[place] = value;
  return tensor;
}

// Runs an operation that works in place.
template <typename Start>
Values in_place(World& world, const torch::Tensor& before, const torch::Tensor& expected,
                const Start& start) {
  const torch::Tensor tensor = before.to(world.device(), torch::kFloat, /*non_blocking=*/false,
                                         /*copy=*/true);
  start(world.communicator(), tensor);
  return {before, tensor.cpu(), expected};
}

Values send_and_recv(World& world) {
  const int last = world.size() - 1;
  const torch::Tensor mine = values_of(world.rank(), world.size());
  const bool receives = world.rank() == last;
  return in_place(world, mine, receives ? values_of(0, world.size()) : mine,
                  [&](auto& communicator, const torch::Tensor& tensor) {
                    if (world.rank() == 0) communicator.send(tensor, last, "a message").wait();
                    if (receives) communicator.recv(tensor, 0, "a message").wait();
                  });
}

Values broadcast(World& world) {
  return in_place(world, values_of(world.rank(), world.size()), values_of(kRoot, world.size()),
                  [](auto& communicator, const torch::Tensor& tensor) {
                    communicator.broadcast(tensor, kRoot, "values").wait();
                  });
}

Values reduce(World& world) {
  const torch::Tensor mine = values_of(world.rank(), world.size());
  return in_place(world, mine, world.rank() == kRoot ? sums(world) : mine,
                  [](auto& communicator, const torch::Tensor& tensor) {
                    communicator.reduce(tensor, ReduceOp::kSum, kRoot, "values").wait();
                  });
}

Values all_reduce(World& world) {
  return in_place(world, values_of(world.rank(), world.size()), sums(world),
                  [](auto& communicator, const torch::Tensor& tensor) {
                    communicator.all_reduce(tensor, ReduceOp::kSum, "values").wait();
                  });
}

Values reduce_scatter(World& world) {
  const torch::Tensor mine = values_of(world.rank(), world.size());
  torch::Tensor expected = mine.clone();
  expected[world.rank()] = sums(world)[world.rank()];
  return in_place(world, mine, expected, [](auto& communicator, const torch::Tensor& tensor) {
    communicator.reduce_scatter(tensor, ReduceOp::kSum, "values").wait();
  });
}

Values gather(World& world) {
  const bool is_root = world.rank() == kRoot;
  const float mine = 10.0F * static_cast<float>(world.rank());
  const torch::Tensor before = is_root ? filled_at(world, kRoot, mine) : torch::full({1}, mine);
  return in_place(world, before, is_root ? firsts(world) : before,
                  [](auto& communicator, const torch::Tensor& tensor) {
                    communicator.gather(tensor, kRoot, "values").wait();
                  });
}

Values all_gather(World& world) {
  const float mine = 10.0F * static_cast<float>(world.rank());
  return in_place(world, filled_at(world, world.rank(), mine), firsts(world),
                  [](auto& communicator, const torch::Tensor& tensor) {
                    communicator.all_gather(tensor, "values").wait();
                  });
}

Values scatter(World& world) {
  const bool is_root = world.rank() == kRoot;
  const torch::Tensor whole = values_of(kRoot, world.size());
  return in_place(world, is_root ? whole : torch::full({1}, kNothing),
                  is_root ? whole : whole.slice(0, world.rank(), world.rank() + 1),
                  [](auto& communicator, const torch::Tensor& tensor) {
                    communicator.scatter(tensor, kRoot, "values").wait();
                  });
}

Values all_to_all(World& world) {
  const torch::Tensor given = values_of(world.rank(), world.size());
  const torch::Tensor on_device = given.to(world.device());
  const torch::Tensor received = torch::full_like(on_device, kNothing);
  world.communicator().all_to_all(on_device, received, "values").wait();
  return {given, received.cpu(), firsts(world) + world.rank()};
}

// Ranks come one after the other. The clock is that of the host, which all of them share.
Values barrier(World& world) {
  const auto now = [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  };
  std::this_thread::sleep_for(std::chrono::milliseconds(20) * world.rank());
  const double came = now();
  world.communicator().barrier("a meeting").wait();
  const bool nobody_left_early = world.max(came) <= world.min(now());
  const torch::Tensor none = torch::empty({0});
  return {none, nobody_left_early ? none : torch::full({1}, kNothing), none};
}

}  // namespace

const std::vector<Operation>& operations() {
  static const std::vector<Operation> all = {
      {"send, recv", "the first rank's values go to the last rank", send_and_recv},
      {"broadcast", "all ranks get the root's values; the root is rank 0 here and below",
       broadcast},
      {"reduce", "the root gets the sum of all ranks' values; the others keep theirs", reduce},
      {"all_reduce", "all ranks get the sum", all_reduce},
      {"reduce_scatter", "rank r gets element r of the sum, in its place", reduce_scatter},
      {"gather", "the root gets a value from each rank", gather},
      {"all_gather", "all ranks get a value from each rank", all_gather},
      {"scatter", "each rank gets a value from the root", scatter},
      {"all_to_all", "rank r gets value r of each rank", all_to_all},
      {"barrier", "no rank leaves before the last has come; carries no values", barrier}};
  return all;
}

}  // namespace collectives_tour
