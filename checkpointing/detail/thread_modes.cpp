#include "checkpointing/detail/thread_modes.h"

#include <array>
#include <cstring>
#include <mutex>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/TensorBody.h>
#include <ATen/core/grad_mode.h>

namespace zeropage::checkpointing::detail {
namespace {

constexpr std::array kAutocastDevices = {c10::DeviceType::CPU, c10::DeviceType::CUDA};

void copy_state(at::Generator to, const at::Generator& from) {
  const std::lock_guard lock(to.mutex());
  if (to.device().is_cpu()) {
    // As set_state, without a tensor of 5 KB in between.
    auto& target = *to.get<at::CPUGeneratorImpl>();
    auto& source = *from.get<at::CPUGeneratorImpl>();
    target.set_engine(source.engine());
    target.set_next_float_normal_sample(source.next_float_normal_sample());
    target.set_next_double_normal_sample(source.next_double_normal_sample());
  } else {
    to.set_state(from.get_state());
  }
}

bool same(const at::Generator& left, const at::Generator& right) {
  if (left.device() != right.device()) return false;
  if (left.device().is_cpu()) {
    auto& a = *left.get<at::CPUGeneratorImpl>();
    auto& b = *right.get<at::CPUGeneratorImpl>();
    const at::mt19937_data_pod x = a.engine().data(), y = b.engine().data();
    return x.seed_ == y.seed_ && x.left_ == y.left_ && x.next_ == y.next_ && x.state_ == y.state_ &&
           a.next_float_normal_sample() == b.next_float_normal_sample() &&
           a.next_double_normal_sample() == b.next_double_normal_sample();
  }
  const at::Tensor x = left.get_state(), y = right.get_state();
  return x.nbytes() == y.nbytes() &&
         std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

}  // namespace

RandomState RandomState::take(c10::Device device) {
  RandomState taken;
  taken.states_.emplace_back(at::detail::getDefaultCPUGenerator(), at::Generator());
  if (device.is_cuda()) {
    taken.states_.emplace_back(at::globalContext().defaultGenerator(device), at::Generator());
  }
  return taken.of_now();
}

RandomState RandomState::of_now() const {
  RandomState now;
  for (const auto& [known, copy] : states_) {
    at::Generator generator = known;
    const std::lock_guard lock(generator.mutex());
    now.states_.emplace_back(generator, generator.clone());
  }
  return now;
}

void RandomState::put_back() const {
  for (const auto& [generator, copy] : states_) copy_state(generator, copy);
}

bool operator==(const RandomState& left, const RandomState& right) {
  if (left.states_.size() != right.states_.size()) return false;
  for (size_t index = 0; index < left.states_.size(); ++index) {
    if (!same(left.states_[index].second, right.states_[index].second)) return false;
  }
  return true;
}

ThreadModes ThreadModes::take() {
  ThreadModes modes;
  modes.grad_mode_ = at::GradMode::is_enabled();
  modes.autocast_cache_ = at::autocast::is_autocast_cache_enabled();
  for (size_t index = 0; index < kAutocastDevices.size(); ++index) {
    const auto device = kAutocastDevices[index];
    modes.autocast_[index] = {at::autocast::is_autocast_enabled(device),
                              at::autocast::get_autocast_dtype(device)};
  }
  return modes;
}

void ThreadModesScope::apply(const ThreadModes& modes) {
  at::GradMode::set_enabled(modes.grad_mode_);
  at::autocast::set_autocast_cache_enabled(modes.autocast_cache_);
  for (size_t index = 0; index < kAutocastDevices.size(); ++index) {
    at::autocast::set_autocast_enabled(kAutocastDevices[index], modes.autocast_[index].enabled);
    at::autocast::set_autocast_dtype(kAutocastDevices[index], modes.autocast_[index].dtype);
  }
}

ThreadModesScope::ThreadModesScope(const ThreadModes& modes) : before_(ThreadModes::take()) {
  apply(modes);
  at::autocast::increment_nesting();
}

ThreadModesScope::~ThreadModesScope() {
  // The casts of weights that autocast caches belong to graphs of this scope.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  apply(before_);
}

}  // namespace zeropage::checkpointing::detail
