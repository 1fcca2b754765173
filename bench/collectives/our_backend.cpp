#include <utility>

#include "bench/collectives/backend.h"
#include "zeropage/check.h"
#include "zeropage/world.h"

namespace collectives {
namespace {

using zeropage::comm::ReduceOp;
using zeropage::comm::Transport;
using zeropage::comm::World;

constexpr const char* kMeasured = "the measured tensor";

class OurBackend : public Backend {
 public:
  explicit OurBackend(World world) : world_(std::move(world)) {}

  void run(const Call& call) override { start(call).wait(); }

 private:
  zeropage::comm::Pending start(const Call& call) {
    zeropage::comm::Communicator& communicator = world_.communicator();
    switch (call.operation) {
      case Operation::kAllGather:
        return communicator.all_gather(call.whole, kMeasured);
      case Operation::kReduceScatter:
        return communicator.reduce_scatter(call.whole, ReduceOp::kSum, kMeasured);
      case Operation::kAllReduce:
        return communicator.all_reduce(call.whole, ReduceOp::kSum, kMeasured);
      case Operation::kBroadcast:
        return communicator.broadcast(call.whole, call.root, kMeasured);
      case Operation::kBarrier:
        return communicator.barrier(kMeasured);
    }
    TORCH_INTERNAL_ASSERT(false, "an operation without a call");
  }

  World world_;
};

}  // namespace

std::unique_ptr<Backend> make_backend(const std::string& transport,
                                      const zeropage::comm::Place& place,
                                      c10::intrusive_ptr<c10d::Store> store) {
  if (transport == "c10d") return make_c10d_backend(place, store);
  ZP_CHECK(transport == "shared" || transport == "gloo", "there is no transport \"", transport,
           "\"; expected shared, gloo or c10d");
  const Transport ours = transport == "shared" ? Transport::kShared : Transport::kGloo;
  return std::make_unique<OurBackend>(World(place, std::move(store), {.transport = ours}));
}

}  // namespace collectives
