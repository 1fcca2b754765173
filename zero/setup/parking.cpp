#include "zero/setup/parking.h"

#include <functional>
#include <utility>

#include "device/host_memory.h"
#include "device/stream.h"
#include "zero/setup/memory_need.h"
#include "zeropage/check.h"
#include "zeropage/device.h"

namespace zeropage::zero {
namespace {

using memory::Tier;

// What it throws, in words; "" for nothing.
std::string words_of_error(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    return memory::message_of(error);
  }
  return "";
}

void check_host_has_room(const comm::World& ranks, int64_t bytes) {
  const device::HostMemory host = device::read_host_memory();
  const int64_t of_all = bytes * ranks.local_size();
  ZP_CHECK(of_all <= host.usable_bytes(), "park(Tier::kHost): the model on ", ranks.local_size(),
           " ranks ", device::describe_need(of_all, host),
           "; call park(Tier::kNvme, directory), or free host memory first");
}

// Gives what is free to other programs.
void release_free_memory(c10::Device device) {
  memory::release_cached_memory(device);
  memory::return_idle_memory();
}

}  // namespace

// Optimizers and what the script keeps of the module may outlive it.
Parking::~Parking() {
  if (!is_parked()) return;
  sharded_.memory->set_away(
      "the model was destroyed while it was parked, and its values are gone; call resume() of a "
      "model before it goes");
}

// Ranks may be out of step, or one of them may have been told otherwise.
void Parking::check_alike(const char* who, const std::string& asked) const {
  ZP_CHECK(!all_ranks_.device().is_meta(), who,
           ": a simulated run has no memory that could leave; leave the call out");
  all_ranks_.check_agreement(who,
                             {asked, is_parked() ? "the model is parked" : "it is not parked"});
}

void Parking::park(Tier tier, const std::string& directory) {
  check_alike("park()", c10::str("park to ", name(tier)));
  ZP_CHECK(!is_parked(), "park(): the model is parked already; call resume() first");
  const c10::Device device = all_ranks_.device();
  ZP_CHECK(tier != Tier::kDevice,
           "park(Tier::kDevice): expected Tier::kHost or Tier::kNvme, the tier that it leaves the "
           "device for");
  ZP_CHECK(tier != Tier::kHost || !device.is_cpu(),
           "park(Tier::kHost): the model's device is the host, so its memory would not leave it; "
           "call park(Tier::kNvme, directory)");
  const std::string& folder =
      directory.empty() ? sharded_.options.offload.nvme_directory : directory;
  const at::NoGradGuard no_grad;
  std::unique_ptr<ParkedMemory> leaving;
  throw_alike(all_ranks_, "park()", words_of_error([&] {
                ZP_CHECK(tier != Tier::kNvme || !folder.empty(),
                         "park(Tier::kNvme): expected a directory on a local disk, got none; give "
                         "it as the second argument, or as options.offload.nvme_directory");
                settle();
                leaving = find_memory();
              }));
  throw_alike(all_ranks_, "the memory that is parked", words_of_error([&] {
                if (tier == Tier::kHost) check_host_has_room(all_ranks_, leaving->bytes());
                leaving->put_away(
                    make_parking_place({.tier = tier,
                                        .device = device,
                                        .directory = folder,
                                        .name = c10::str("rank-", all_ranks_.rank(), ".parked")},
                                       leaving->pieces()));
              }));
  buffers_->begin_move();
  leaving->leave(c10::str("on ", name(tier)));
  sharded_.memory->set_away(
      "the model is parked, and its parameters, states and buffers have no memory; call "
      "resume() of the wrapped model first, on all ranks");
  parked_ = std::move(leaving);
  if (const auto& page_offload = sharded_.pages->page_offload()) page_offload->release_buffers();
  release_free_memory(device);
}

void Parking::resume() {
  check_alike("resume()", "resume");
  ZP_CHECK(is_parked(), "resume(): the model is not parked; call park() first");
  const at::NoGradGuard no_grad;
  const std::string error = words_of_error([&] {
    sharded_.memory->check_stream("resume()");
    parked_->fetch();
  });
  try {
    throw_alike(all_ranks_, "the memory that comes back", error);
  } catch (...) {
    parked_->forget_fetched();
    release_free_memory(all_ranks_.device());
    throw;
  }
  parked_->come_back();
  parked_.reset();
  sharded_.memory->set_away("");
  sharded_.in_place->note_moved();
  buffers_->end_move();
  memory::return_idle_memory();
}

// Nothing is under way on the device behind it.
void Parking::settle() const {
  sharded_.memory->check_stream("park()");
  std::string pending = sharded_.reducer->what_is_pending();
  if (pending.empty()) pending = sharded_.holders->settle();
  ZP_CHECK(pending.empty(), "park(): ", pending,
           ", and park() is for the time between two steps; call step() and zero_grad() first, "
           "which leaves no gradient");
  sharded_.in_place->check("park()");
  sharded_.reducer->release_zeroed();
  sharded_.paging->release_all("park()");
  device::Stream::current(all_ranks_.device()).record().synchronize();
}

std::unique_ptr<ParkedMemory> Parking::find_memory() const {
  auto found = std::make_unique<ParkedMemory>(all_ranks_.device());
  const VisitMemory add = [&](const at::Tensor& memory, memory::Kind kind) {
    found->add(memory, kind);
  };
  sharded_.memory->visit(add);
  const ParameterPages& pages = *sharded_.pages;
  for (const PlacedStorage& placed : pages.storages()) {
    if (pages.is_sharded(placed.page)) continue;
    const at::Tensor& whole = sharded_.memory->whole(placed.page);
    found->add_within(whole, placed.range.begin * static_cast<int64_t>(whole.element_size()),
                      pages.parameters()[placed.parameters.front()].parameter.tensor.storage());
  }
  sharded_.paging->visit(add);
  sharded_.masters->visit(add);
  sharded_.holders->visit(add);
  // What nobody named when the module was made.
  for (const at::Tensor& buffer : module_->buffers()) {
    found->add(buffer, memory::Kind::kActivationAndOther);
  }
  return found;
}

}  // namespace zeropage::zero
