#include "checkpointing/detail/thread_modes.h"

#include <algorithm>
#include <array>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include "operators/generator_state.h"

namespace zeropage::checkpointing::detail {
namespace {

constexpr std::array kAutocastDevices = {c10::DeviceType::CPU, c10::DeviceType::CUDA};

}  // namespace

RandomState RandomState::take(c10::Device device) {
  RandomState taken = take_of_accelerator(device);
  taken.add(at::detail::getDefaultCPUGenerator());
  return taken;
}

RandomState RandomState::take_of_accelerator(c10::Device device) {
  RandomState taken;
  if (device.is_cuda()) taken.add(at::globalContext().defaultGenerator(device));
  return taken;
}

void RandomState::add(const at::Generator& generator) {
  const bool known = std::any_of(states_.begin(), states_.end(),
                                 [&](const auto& state) { return state.first == generator; });
  if (!known) states_.emplace_back(generator, operators::copy_of(generator));
}

RandomState RandomState::of_now() const {
  RandomState now;
  for (const auto& [known, copy] : states_) {
    now.states_.emplace_back(known, operators::copy_of(known));
  }
  return now;
}

void RandomState::put_back() const {
  for (const auto& [generator, copy] : states_) operators::assign_state(generator, copy);
}

bool operator==(const RandomState& left, const RandomState& right) {
  if (left.states_.size() != right.states_.size()) return false;
  for (size_t index = 0; index < left.states_.size(); ++index) {
    if (!operators::same_state(left.states_[index].second, right.states_[index].second))
      return false;
  }
  return true;
}

ThreadModes ThreadModes::take() {
  ThreadModes modes;
  modes.grad_mode_ = at::GradMode::is_enabled();
  modes.autocast_cache_ = at::autocast::is_autocast_cache_enabled();
  modes.replacement_ = operators::current_replacement();
  for (size_t index = 0; index < kAutocastDevices.size(); ++index) {
    const auto device = kAutocastDevices[index];
    modes.autocast_[index] = {at::autocast::is_autocast_enabled(device),
                              at::autocast::get_autocast_dtype(device)};
  }
  return modes;
}

bool ThreadModes::casts() const {
  return std::any_of(autocast_.begin(), autocast_.end(),
                     [](const Autocast& of_device) { return of_device.enabled; });
}

void ThreadModesScope::apply(const ThreadModes& modes) {
  at::GradMode::set_enabled(modes.grad_mode_);
  at::autocast::set_autocast_cache_enabled(modes.autocast_cache_);
  operators::set_current_replacement(modes.replacement_);
  for (size_t index = 0; index < kAutocastDevices.size(); ++index) {
    at::autocast::set_autocast_enabled(kAutocastDevices[index], modes.autocast_[index].enabled);
    at::autocast::set_autocast_dtype(kAutocastDevices[index], modes.autocast_[index].dtype);
  }
}

ThreadModesScope::ThreadModesScope(const ThreadModes& modes)
    : before_(ThreadModes::take()), casts_(modes.casts() || before_.casts()) {
  if (casts_) at::autocast::clear_cache();
  apply(modes);
  at::autocast::increment_nesting();
}

ThreadModesScope::~ThreadModesScope() {
  // The casts of weights that autocast caches belong to graphs of this scope.
  if (at::autocast::decrement_nesting() == 0 || casts_) at::autocast::clear_cache();
  apply(before_);
}

}  // namespace zeropage::checkpointing::detail
