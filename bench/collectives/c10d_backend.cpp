#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "bench/collectives/backend.h"

namespace collectives {
namespace {

using c10d::ProcessGroupGloo;

class C10dBackend : public Backend {
 public:
  explicit C10dBackend(c10::intrusive_ptr<ProcessGroupGloo> group) : group_(std::move(group)) {}

  void run(const Call& call) override { start(call)->wait(); }

 private:
  c10::intrusive_ptr<c10d::Work> start(const Call& call) {
    switch (call.operation) {
      case Operation::kAllGather: {
        at::Tensor whole = call.whole;
        at::Tensor slice = call.slice;
        return group_->_allgather_base(whole, slice);
      }
      case Operation::kReduceScatter: {
        at::Tensor whole = call.whole;
        at::Tensor slice = call.slice;
        return group_->_reduce_scatter_base(slice, whole);
      }
      case Operation::kAllReduce: {
        std::vector<at::Tensor> tensors = {call.whole};
        return group_->allreduce(tensors);
      }
      case Operation::kBroadcast: {
        std::vector<at::Tensor> tensors = {call.whole};
        c10d::BroadcastOptions options;
        options.rootRank = call.root;
        return group_->broadcast(tensors, options);
      }
      case Operation::kBarrier:
        return group_->barrier();
    }
    TORCH_INTERNAL_ASSERT(false, "an operation without a call");
  }

  c10::intrusive_ptr<ProcessGroupGloo> group_;
};

}  // namespace

std::unique_ptr<Backend> make_c10d_backend(const zeropage::comm::Place& place,
                                           const c10::intrusive_ptr<c10d::Store>& store) {
  auto options = ProcessGroupGloo::Options::create();
  // The interface that ours takes too.
  options->devices = {
      ProcessGroupGloo::createDeviceForHostname(zeropage::comm::address_for_peers(place))};
  return std::make_unique<C10dBackend>(
      c10::make_intrusive<ProcessGroupGloo>(store, place.rank, place.world_size, options));
}

}  // namespace collectives
