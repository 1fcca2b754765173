#include "saving/detail/saved_generators.h"

#include <array>
#include <charconv>
#include <mutex>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include "zero/model_parts.h"
#include "zero/pages/parameter_pages.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/check.h"

namespace zeropage::saving {
namespace {

using nlohmann::json;

constexpr std::array kAxes = {"data", "pipeline", "tensor"};
using Sizes = std::array<size_t, kAxes.size()>;

std::string hex(const at::Tensor& bytes) {
  static constexpr const char* kDigits = "0123456789abcdef";
  const auto* const begin = bytes.const_data_ptr<uint8_t>();
  std::string text;
  for (int64_t i = 0; i < bytes.numel(); ++i) {
    text += kDigits[begin[i] >> 4];
    text += kDigits[begin[i] & 15];
  }
  return text;
}

at::Tensor bytes_of_hex(const std::string& text) {
  const at::Tensor bytes = at::empty({static_cast<int64_t>(text.size() / 2)}, at::kByte);
  auto* const to = bytes.mutable_data_ptr<uint8_t>();
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    std::from_chars(text.data() + i, text.data() + i + 2, to[i / 2], 16);
  }
  return bytes;
}

// LibTorch's state of the host's generator has 4 and 3 bytes between its fields that it never writes.
void zero_padding(const at::Tensor& state) {
  constexpr int64_t kBytes = 5056;
  if (state.numel() != kBytes) return;
  at::Tensor(state).narrow(0, 5044, 4).zero_();
  at::Tensor(state).narrow(0, 5053, 3).zero_();
}

at::Generator generator_of(c10::Device device) {
  return device.is_cpu() ? at::detail::getDefaultCPUGenerator()
                         : at::globalContext().defaultGenerator(device);
}

std::string state_of(c10::Device device) {
  at::Generator generator = generator_of(device);
  const std::lock_guard lock(generator.mutex());
  const at::Tensor state = generator.get_state().clone();
  if (device.is_cpu()) zero_padding(state);
  return hex(state);
}

void set_state(c10::Device device, const std::string& state) {
  at::Generator generator = generator_of(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(bytes_of_hex(state));
}

size_t place_on(const json& own, size_t axis) {
  return own.at("places").at(axis);
}

size_t size_of(const json& own, size_t axis) {
  return own.at("sizes").at(axis);
}

// Along a list of so many entries on each axis, the last axis fastest. An axis of one entry is for all
// places on it.
size_t index_of(const json& own, const Sizes& sizes) {
  size_t index = 0;
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    index = index * sizes[axis] + (sizes[axis] == 1 ? 0 : place_on(own, axis));
  }
  return index;
}

// One entry on that axis, where those of all its places are the same.
bool is_alike_along(size_t axis, const Sizes& sizes, const std::vector<json>& entries) {
  size_t stride = 1;
  for (size_t later = axis + 1; later < sizes.size(); ++later) stride *= sizes[later];
  for (size_t i = 0; i < entries.size(); ++i) {
    const size_t place = i / stride % sizes[axis];
    if (entries[i] != entries[i - place * stride]) return false;
  }
  return true;
}

std::vector<json> by_place(const std::vector<json>& by_rank, Sizes& sizes) {
  size_t count = 1;
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    sizes[axis] = size_of(by_rank.front(), axis);
    count *= sizes[axis];
  }
  std::vector<json> entries(count);
  for (const json& own : by_rank) entries[index_of(own, sizes)] = own.at("states");
  return entries;
}

Sizes sizes_of(const json& saved) {
  Sizes sizes{};
  size_t count = 1;
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    sizes[axis] = saved.at("axes").value(kAxes[axis], size_t{1});
    count *= sizes[axis];
  }
  ZP_CHECK(count == saved.at("states").size() && count > 0,
           "manifest.json: content.random: expected ", count, " states for axes ",
           saved.at("axes").dump(), ", got ", saved.at("states").size());
  return sizes;
}

}  // namespace

SeededAlike::SeededAlike(c10::Device device) : device_(device), host_state_(state_of(at::kCPU)) {
  if (device.is_cuda()) device_state_ = state_of(device);
  at::manual_seed(0);
}

void SeededAlike::put_back() const {
  set_state(at::kCPU, host_state_);
  if (device_.is_cuda()) set_state(device_, device_state_);
}

json own_generators(const ModelRef& model) {
  const zero::ParameterPages& pages = *model->sharded().pages;
  json places = json::array(), sizes = json::array();
  for (const comm::World* world :
       {&std::as_const(model->world()), zero::pipeline_world_of(pages), pages.tensor_world()}) {
    places.push_back(world == nullptr ? 0 : world->rank());
    sizes.push_back(world == nullptr ? 1 : world->size());
  }
  json states = json::object();
  const c10::Device device = model->world().device();
  if (!device.is_meta()) states["cpu"] = state_of(at::kCPU);
  // Where an accelerator has no generator, as a device of tests, there is nothing to keep.
  if (device.is_cuda()) states["device"] = state_of(device);
  return {{"places", places}, {"sizes", sizes}, {"states", states}};
}

json merged_generators(const std::vector<json>& by_rank) {
  Sizes sizes{};
  std::vector<json> entries = by_place(by_rank, sizes);
  json axes = json::object();
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    if (sizes[axis] == 1) continue;
    if (!is_alike_along(axis, sizes, entries)) {
      axes[kAxes[axis]] = sizes[axis];
      continue;
    }
    Sizes fewer = sizes;
    fewer[axis] = 1;
    std::vector<json> kept(entries.size() / sizes[axis]);
    size_t stride = 1;
    for (size_t later = axis + 1; later < sizes.size(); ++later) stride *= sizes[later];
    for (size_t i = 0; i < kept.size(); ++i) {
      kept[i] = entries[i / stride * stride * sizes[axis] + i % stride];
    }
    entries = std::move(kept);
    sizes = fewer;
  }
  return {{"axes", axes}, {"states", entries}};
}

std::string reason_to_stay(const json& saved, const std::vector<json>& by_rank) {
  const Sizes of_state = sizes_of(saved);
  Sizes now{};
  const std::vector<json> entries = by_place(by_rank, now);
  constexpr size_t kTensor = 2;
  for (size_t axis = 0; axis < now.size(); ++axis) {
    if (of_state[axis] == now[axis]) continue;
    if (of_state[axis] > 1) {
      return c10::str("the state has generators of random numbers of ", of_state[axis],
                      " ranks along \"", kAxes[axis], "\"; those of these ", now[axis],
                      " stay as they are");
    }
    // Ranks of a tensor-parallel group draw alike, so theirs are one's in any case.
    if (axis != kTensor && !is_alike_along(axis, now, entries)) {
      return c10::str("the state has one generator of random numbers for all ranks along \"",
                      kAxes[axis], "\"; these ", now[axis],
                      " were seeded apart, so theirs stay as they are");
    }
  }
  return "";
}

void set_generators(const json& saved, const json& own, const ModelRef& model) {
  const json& states = saved.at("states").at(index_of(own, sizes_of(saved)));
  const c10::Device device = model->world().device();
  set_state(at::kCPU, states.at("cpu"));
  if (device.is_cuda() && states.contains("device")) set_state(device, states["device"]);
}

}  // namespace zeropage::saving
