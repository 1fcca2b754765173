// Deferred construction: the operators of a constructor, recorded without memory and replayed
// storage by storage.
//
//   torch::nn::Sequential model{nullptr};
//   ConstructionTape tape([&] { model = make_model(); });   // parameters on the meta device
//   tape.replay(model->parameters(), [&](const c10::StorageImpl& meta, at::Tensor values) { ... });
//
// While `construct` runs, tensors that operators make lie on the meta device; what it seeds and
// draws is noted, not drawn. A replay draws the same numbers in the same order, so the values are
// the plain constructor's bits, with memory for what is in flight only: a storage exists from the
// first operator whose result somebody still reads to its last, and what is overwritten unread is
// not computed. A tensor that already has values (torch::tensor of a list, from_blob, one captured
// from outside) stays real; operators on such tensors alone run at once.
//
// Random numbers. A replay begins with the generator states that the constructor found, whatever
// was drawn since. After the recording a generator is as if the constructor had only seeded it, and
// not drawn. After a replay it is as the plain constructor leaves it, unless somebody used or
// seeded it since the recording: then it stays as the replay found it. So replay one tape before
// the next recording that should go on drawing. LibTorch's default generator is the process's:
// recordings on several threads wait for each other, other draws at that time are an error.
//
// Lifetime: the tape keeps the meta storages and captured tensors alive, and nothing else; it does
// not need `construct` afterwards.
// Threads: a recording sees its own thread only. A tape belongs to one thread at a time.
// Shapes: a storage is handed over whole, 1-D, as the meta tensors on it see it.
// Throws c10::Error for a constructor that reads values, an operator without a meta kernel, another
// device, a recording inside a recording; on replay for a target that is not on the tape, a tensor
// that the module kept beside its targets, a captured tensor that was changed since. What
// `construct` throws comes through.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/TensorBody.h>

namespace zeropage::operators {

namespace detail {
struct Tape;
}

class ConstructionTape {
 public:
  // values: [numel of the whole storage], on the CPU, in the dtype of the first target on the
  // storage. The sink owns them.
  using Sink = std::function<void(const c10::StorageImpl& meta_storage, at::Tensor values)>;

  // Runs `construct` on this thread and records it.
  explicit ConstructionTape(const std::function<void()>& construct);
  ~ConstructionTape();
  ConstructionTape(ConstructionTape&& other) noexcept;
  ConstructionTape& operator=(ConstructionTape&& other) noexcept;

  // Whether the calling thread records a construction.
  static bool is_recording();

  // Whether a replay can give this tensor values. A parameter that has real memory already is not
  // on the tape.
  bool holds(const at::Tensor& tensor) const;

  // Hands every storage of `targets` over once, after its last operator, in the order of the tape.
  // targets: meta tensors of the recording; all that are still alive, several may share a storage.
  void replay(const std::vector<at::Tensor>& targets, const Sink& sink) const;

 private:
  std::unique_ptr<operators::detail::Tape> tape_;
};

}  // namespace zeropage::operators
