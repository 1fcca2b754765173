#include "zero/tiers/page_offload.h"

#include <utility>

#include "device/device_places.h"
#include "device/topology.h"
#include "zero/tiers/nvme_storage.h"
#include "zero/tiers/simulated_storage.h"
#include "zero/tiers/transient_storage.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace zeropage::zero {
namespace {

using memory::Tier;

// The cores of this rank, near its device: ranks that are threads of one process share what the
// process has.
device::CoreSet cores_of(const comm::World& world) {
  // The other ranks of a simulated world are not here.
  if (world.device().is_meta()) return device::own_core_set();
  const int ranks = world.local_size();
  const auto sets = device::Machine::here().core_sets(
      ranks, world.device().is_cuda() ? device::device_nodes_of_ranks(ranks) : std::vector<int>());
  return sets[static_cast<size_t>(world.local_rank())];
}

}  // namespace

std::shared_ptr<PageOffload> PageOffload::make(const comm::World& world, const Options& options) {
  if (!options.offload.any()) return nullptr;
  return std::shared_ptr<PageOffload>(new PageOffload(world, options));
}

PageOffload::PageOffload(const comm::World& world, const Options& options)
    : options_(options.offload), world_(world) {
  const c10::Device device = world.device();
  const device::CoreSet cores = cores_of(world);
  pool_ = std::make_unique<optim::WorkerPool>(
      optim::WorkerPoolOptions{.cores = cores, .threads = options_.worker_threads});
  const auto make_storage = [&](Tier tier, const char* what) -> std::unique_ptr<TierStorage> {
    if (device.is_meta()) return std::make_unique<SimulatedStorage>(tier);
    if (tier != Tier::kNvme) return std::make_unique<HostStorage>(device, cores);
    return std::make_unique<NvmeStorage>(
        offload::NvmeFileOptions{.directory = options_.nvme_directory,
                                 .name = c10::str("rank-", world.rank(), ".", what),
                                 .owner = what});
  };
  copies_ = offload::CopyEngine::make(device, {.bytes_per_second = options_.link_bytes_per_second});
  values_ = make_storage(options_.optimizer, "values");
  states_ = make_storage(options_.optimizer, "optimizer-state");
  staging_ = make_storage(Tier::kHost, "staging");
  gradients_ = make_storage(Tier::kHost, "gradients");
  // Each goes as soon as its page is updated.
  if (options_.step == StepWhen::kInBackward) {
    gradients_ = std::make_unique<TransientStorage>(
        device.is_meta() ? device : c10::Device(c10::kCPU), std::move(gradients_));
  }
  parameters_ = make_storage(options_.parameters, "parameters");
}

int64_t PageOffload::buffer_bytes() const {
  return values_->buffer_bytes() + states_->buffer_bytes() + parameters_->buffer_bytes();
}

void PageOffload::release_buffers() {
  values_->release_buffers();
  states_->release_buffers();
  parameters_->release_buffers();
}

std::string PageOffload::describe() const {
  std::string lines;
  for (const TierStorage* storage : {values_.get(), states_.get(), parameters_.get()}) {
    const std::string line = storage->describe();
    if (!line.empty()) lines += line + "\n";
  }
  return lines;
}

void PageOffload::fetch_values(size_t page) {
  values_->fetch(page);
  if (offloads_parameters()) parameters_->fetch(page);
}

void PageOffload::release_values(size_t page, TierStorage::Use use) {
  values_->release(page, use);
  if (offloads_parameters()) parameters_->release(page, use);
}

void PageOffload::start_fetch_for_update(size_t page) {
  values_->start_fetch(page);
  states_->start_fetch(page);
}

void PageOffload::fetch_for_update(size_t page) {
  values_->fetch(page);
  states_->fetch(page);
  if (offloads_parameters()) parameters_->fetch(page);
}

void PageOffload::release_after_update(size_t page, TierStorage::Use use) {
  values_->release(page, use);
  states_->release(page, use);
  if (offloads_parameters()) parameters_->release(page, use);
}

}  // namespace zeropage::zero
