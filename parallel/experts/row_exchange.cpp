#include "parallel/experts/row_exchange.h"

#include <numeric>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "operators/operator_handle.h"
#include "parallel/detail/kernels.h"
#include "parallel/nodes_of_ranks.h"
#include "parallel/rank_operators.h"
#include "parallel/stamp.h"
#include "zeropage/communicator.h"

namespace zeropage::parallel::experts {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOtherLayer =
    "runs a layer of experts with other sizes, another dtype or other options; all ranks along "
    "\"expert\" run the same layers in the same order, also those without tokens";

int64_t sum_of(at::IntArrayRef numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), int64_t{0});
}

// Each rank's rows in a tensor of all.
std::vector<Tensor> parts_of(const Tensor& rows, at::IntArrayRef numbers) {
  std::vector<Tensor> parts;
  int64_t first = 0;
  for (const int64_t number : numbers) {
    parts.push_back(rows.narrow(0, first, number).view(-1));
    first += number;
  }
  return parts;
}

Tensor compute_exchange_loads(const Tensor& load, const RanksPointer& ranks,
                              const std::string& name) {
  const comm::World& world = ranks->world;
  Stamp stamp(name);
  const int64_t experts = load.numel() / world.size();
  const Tensor given = at::empty({world.size(), experts + Stamp::numel(at::kLong)}, load.options());
  given.narrow(1, 0, experts).copy_(load.view({world.size(), experts}));
  for (int rank = 0; rank < world.size(); ++rank) stamp.put(given[rank]);
  const Tensor received = at::empty_like(given);
  world.communicator().all_to_all(given.view(-1), received.view(-1), name).wait();
  for (int rank = 0; rank < world.size(); ++rank) stamp.note(received[rank], rank);
  stamp.check(world, kOtherLayer);
  const Tensor loads = received.narrow(1, 0, experts).contiguous();
  return loads.is_meta() ? loads : loads.cpu();
}

// In each round a rank has one partner, and of two partners the lower one sends first. So nobody waits for a rank that waits.
Tensor compute_exchange_rows(const Tensor& rows, at::IntArrayRef given, at::IntArrayRef received,
                             const RanksPointer& ranks, const std::string& name) {
  const comm::World& world = ranks->world;
  comm::Communicator& communicator = world.communicator();
  const Tensor sent = rows.contiguous();
  Tensor result = at::empty({sum_of(received), rows.size(1)}, rows.options());
  const std::vector<Tensor> to = parts_of(sent, given), from = parts_of(result, received);
  const auto own = static_cast<size_t>(world.rank());
  std::vector<comm::Pending> under_way;
  for (int round = 0; round < world.size(); ++round) {
    const int partner = (round - world.rank() + world.size()) % world.size();
    if (partner == world.rank()) continue;
    const auto there = static_cast<size_t>(partner);
    const auto send = [&] {
      if (to[there].numel() > 0) {
        under_way.push_back(communicator.send(to[there], partner, name));
      }
    };
    if (world.rank() < partner) send();
    if (from[there].numel() > 0) {
      under_way.push_back(communicator.recv(from[there], partner, name));
    }
    if (world.rank() > partner) send();
  }
  Tensor(from[own]).copy_(to[own]);
  for (const comm::Pending& pending : under_way) pending.wait();
  return result;
}

Tensor call_exchange_rows(const Tensor& rows, at::IntArrayRef given, at::IntArrayRef received,
                          const RanksPointer& ranks, const std::string& name) {
  static const auto handle =
      operators::operator_of("zeropage::experts_exchange_rows", &compute_exchange_rows);
  return handle.call(rows, given, received, ranks, name);
}

class ExchangeRows : public torch::autograd::Function<ExchangeRows> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& rows, const RowsOfRanks& numbers,
                        const RanksPointer& ranks, const std::string& name) {
    context->saved_data["given"] = numbers.given;
    context->saved_data["received"] = numbers.received;
    context->saved_data["ranks"] = ranks;
    context->saved_data["name"] = name;
    return call_exchange_rows(rows, numbers.given, numbers.received, ranks, name);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const std::string name = context->saved_data["name"].toStringRef();
    detail::refuse_second_derivative("experts", name);
    return {call_exchange_rows(gradients[0], context->saved_data["received"].toIntVector(),
                               context->saved_data["given"].toIntVector(),
                               context->saved_data["ranks"].toCustomClass<Ranks>(),
                               name + ", backward"),
            Tensor(), Tensor(), Tensor()};
  }
};

TORCH_LIBRARY_FRAGMENT(zeropage, library) {
  register_ranks();
  library.def(
      "experts_exchange_loads(Tensor load, __torch__.torch.classes.zeropage.Ranks ranks, str name) "
      "-> Tensor");
  library.def(
      "experts_exchange_rows(Tensor rows, int[] given, int[] received, "
      "__torch__.torch.classes.zeropage.Ranks ranks, str name) -> Tensor");
}

TORCH_LIBRARY_IMPL(zeropage, CompositeExplicitAutograd, library) {
  library.impl("experts_exchange_loads", &compute_exchange_loads);
  library.impl("experts_exchange_rows", &compute_exchange_rows);
}

}  // namespace

bool is_node_of_rows(const torch::autograd::Node& node) {
  using torch::autograd::CppNode;
  return dynamic_cast<const CppNode<ExchangeRows>*>(&node) != nullptr;
}

at::Tensor exchange_loads(const at::Tensor& load, const RanksPointer& ranks,
                          const std::string& name) {
  static const auto handle =
      operators::operator_of("zeropage::experts_exchange_loads", &compute_exchange_loads);
  return handle.call(load, ranks, name);
}

at::Tensor exchange_rows(const at::Tensor& rows, const RowsOfRanks& numbers,
                         const RanksPointer& ranks, const std::string& name) {
  return ExchangeRows::apply(rows, numbers, ranks, name);
}

}  // namespace zeropage::parallel::experts
