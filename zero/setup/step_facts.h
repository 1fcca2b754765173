// What is known of a run's steps when memory runs out: how large a micro-batch is, how far the step had come, and what its
// activations took. Noted by the wrapper, the optimizer and the Accumulator, and read by the advice (zero/setup/memory_advice.h).
//
// Lifetime: shared by a model, its optimizers and the limit of its memory. Thread-safe.
#pragma once

#include <cstdint>
#include <mutex>

namespace zeropage::zero {

class StepFacts {
 public:
  enum class Phase : uint8_t {
    kUnknown,  // no wrapped forward has begun
    kForward,  // one runs
    kLoss,     // it has ended, and a backward has not
    kEnded,    // a backward that reduced gradients has ended
  };

  struct Values {
    Phase phase = Phase::kUnknown;
    bool trains = true;  // the forward makes a graph
    // In dimension 0 of the forward's first tensor. 0: not known.
    int64_t samples = 0;
    // Breakdown::activations() when the forward began, such as the data and the module's buffers.
    int64_t besides_bytes = 0;
    // What forward and backward of so many samples took at most beyond that, of a step that went through. 0 samples: none did.
    int64_t whole_bytes = 0;
    int64_t whole_samples = 0;
    // The optimizer's, for each parameter. -1: there is none yet.
    int64_t states = -1;
    bool optimizer_can_leave = true;
    int64_t micro_steps = 1;
    bool recomputes = false;  // activations are computed again already
    bool has_batch_norm = false;
    bool in_backward = false;  // an autograd node asks for memory
  };

  // What is known so far; in_backward is of the calling thread.
  Values now() const;

  void note_batch_norm() {
    const std::lock_guard lock(mutex_);
    values_.has_batch_norm = true;
  }
  void note_besides(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    values_.besides_bytes = bytes;
  }
  void begin_forward(int64_t samples, int64_t besides_bytes);
  void end_forward();
  // activation_peak: since the forward began.
  void end_backward(int64_t activation_peak) {
    const std::lock_guard lock(mutex_);
    if (values_.phase != Phase::kLoss) return;
    values_.phase = Phase::kEnded;
    values_.whole_bytes = activation_peak - values_.besides_bytes;
    values_.whole_samples = values_.samples;
  }
  void note_optimizer(int64_t states, bool can_leave) {
    const std::lock_guard lock(mutex_);
    if (states > values_.states) values_.states = states;
    values_.optimizer_can_leave &= can_leave;
  }
  void note_micro_steps(int64_t micro_steps) {
    const std::lock_guard lock(mutex_);
    values_.micro_steps = micro_steps;
  }

 private:
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  Values values_;
  int64_t recomputed_forwards_ = 0;  // of the training thread, when its forward began
};

}  // namespace zeropage::zero
