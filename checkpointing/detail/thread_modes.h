// What decides, besides its tensors, which values a forward computes: the default generators, those
// that its operators are given, grad mode, autocast, what is run in the place of operators. Taken when a forward begins, and put back while it
// is repeated.
//
// Lifetime: values. Threads: any. Generators belong to the process: where other threads draw from one meanwhile, its
// numbers do not come again, here as in LibTorch. Ranks that are threads have seeds instead (operators/seeded_draws.h).
#pragma once

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/ATen_fwd.h>
#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include "operators/operator_interceptor.h"

namespace zeropage::checkpointing::detail {

// The states of the default generators of the host and of a CUDA device, and of others that were added.
class RandomState {
 public:
  // Takes the current states. device: where the forward computes.
  static RandomState take(c10::Device device);
  // Without the host's.
  static RandomState take_of_accelerator(c10::Device device);
  // A generator that an operator is given, before its first draw: its state of now. Nothing happens where
  // it is among these already.
  void add(const at::Generator& generator);
  void put_back() const;
  // Those of the same generators now.
  RandomState of_now() const;
  // Whether nothing was drawn between the two.
  friend bool operator==(const RandomState& left, const RandomState& right);

 private:
  std::vector<std::pair<at::Generator, at::Generator>> states_;  // the generator, and a copy
};

class ThreadModes {
 public:
  static ThreadModes take();
  friend bool operator==(const ThreadModes&, const ThreadModes&) = default;

  // Whether autocast is on for any device.
  bool casts() const;

 private:
  friend class ThreadModesScope;
  struct Autocast {
    bool enabled = false;
    at::ScalarType dtype = at::kFloat;
    friend bool operator==(const Autocast&, const Autocast&) = default;
  };

  bool grad_mode_ = true;
  bool autocast_cache_ = true;
  std::array<Autocast, 2> autocast_;  // of the host, and of CUDA
  std::shared_ptr<operators::OperatorReplacement> replacement_;
};

// While it lives, the calling thread has those modes. Casts of weights that autocast has cached are
// forgotten when it begins and when it ends, where either casts: a cache knows weights but no dtypes.
class ThreadModesScope {
 public:
  explicit ThreadModesScope(const ThreadModes& modes);
  ~ThreadModesScope();
  ThreadModesScope(const ThreadModesScope&) = delete;
  ThreadModesScope& operator=(const ThreadModesScope&) = delete;

 private:
  static void apply(const ThreadModes& modes);

  const ThreadModes before_;
  const bool casts_;  // then or before
};

// While it lives, the generators begin where they were then; afterwards they are as before.
class RandomStateScope {
 public:
  explicit RandomStateScope(const RandomState& state) : before_(state.of_now()) {
    state.put_back();
  }
  ~RandomStateScope() { before_.put_back(); }
  RandomStateScope(const RandomStateScope&) = delete;
  RandomStateScope& operator=(const RandomStateScope&) = delete;

 private:
  const RandomState before_;
};

}  // namespace zeropage::checkpointing::detail
