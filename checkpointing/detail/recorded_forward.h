// What a forward did, as far as it can be done again: operators, and the values that they make.
//
// A value is what a storage holds from one write to the next, also by an operator in place, which
// reads one value and makes another. Views of it are no values of their
// own: a tensor is a value and a geometry. So view operators need no record, and q, k and v in one
// buffer are one value.
//
// Lifetime: by sharing. A value holds the operator that makes it for as long as it may have to be
// made again, an operator holds the values that it reads; who holds a dropped value holds all that
// it takes to bring it back, and nothing else. ValueReplay brings it back.
// Threads: the tape that records guards them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>

#include "checkpointing/detail/operator_facts.h"
#include "checkpointing/detail/thread_modes.h"
#include "checkpointing/detail/value_memory.h"
#include "operators/recorded_argument.h"

namespace zeropage::checkpointing::detail {

// Gives a detached tensor the look of one inside a graph: in-place operators on it are allowed.
void attach_to_nothing(const at::Tensor& tensor);

// What a tensor sees of a storage.
class Geometry {
 public:
  explicit Geometry(const at::Tensor& tensor);
  // Whether a tensor is no more than a storage and a geometry: strided, without lazy bits, not
  // paged, and no Scalar that LibTorch made a tensor.
  static bool describes(const at::Tensor& tensor);
  // Without a graph.
  at::Tensor on(const c10::Storage& storage) const;

 private:
  c10::DispatchKeySet keys_;
  caffe2::TypeMeta dtype_;
  c10::SmallVector<int64_t, 5> sizes_;
  c10::SmallVector<int64_t, 5> strides_;
  int64_t offset_;
};

// The version that a tensor had; without one, of a tensor that nobody can change.
class Version {
 public:
  Version() = default;
  explicit Version(const at::Tensor& tensor);
  bool still_holds() const { return !counter_.enabled() || counter_.current_version() == number_; }

 private:
  c10::VariableVersion counter_;
  uint32_t number_ = 0;
};

struct Operation;

struct Value {
  enum class Source : uint8_t {
    kLeaf,      // was there before the forward; `memory` stays
    kOperator,  // comes from its producer, and can again
    kUnknown,   // by what cannot be repeated or what nobody saw: once gone, it is gone
  };

  size_t index = 0;  // in the order in which the forward showed them
  int64_t bytes = 0;
  Source source = Source::kUnknown;
  c10::weak_intrusive_ptr<c10::StorageImpl> identity;
  Version version;                      // of memory that somebody else can change
  std::shared_ptr<Operation> producer;  // while it may be needed again
  int packs = 0;                        // saved tensors of it that the graph has now
  bool saved = false;                   // it had some
  // FLOPs of its producer, and of what that reads that nobody saved: the cost of a replay that finds all
  // saved values at hand.
  double chain_flops = 0;
  // Whether its producer gathers, or what that reads that was not kept when it ran: to make it again takes pages of all ranks.
  bool chain_gathers = false;
  ValueMemory memory;  // a leaf's is the program's, and does not count as kept

  Value(const c10::Storage& storage, Source from, const std::shared_ptr<KeptBytes>& kept)
      : bytes(static_cast<int64_t>(storage.nbytes())),
        source(from),
        identity(storage.getWeakStorageImpl()),
        memory(bytes, from == Source::kLeaf ? nullptr : kept) {}

  // By an operator that can run again, with inputs that are kept or can be made again.
  bool can_be_made_again() const;
};

struct Operation {
  struct Tensor {
    at::Tensor as_it_is;  // a parameter, or what else a value and a geometry do not describe
    Version version;      // of as_it_is
    std::shared_ptr<Value> value;
    std::optional<Geometry> geometry;
    bool requires_grad = false;
    bool written = false;  // in place: a repetition writes to a copy
  };
  using Argument = operators::RecordedArgument<Tensor>;

  size_t index = 0;
  size_t signature = 0;  // of its name and the sizes of its tensors
  c10::OperatorHandle handle;
  std::string name;
  std::vector<Argument> arguments;
  std::shared_ptr<const ThreadModes> modes;
  std::optional<RandomState> random;  // if it draws
  std::optional<uint64_t> seed;       // if it draws by one (operators/seeded_draws.h)
  std::vector<std::weak_ptr<Value>> results;
  std::vector<std::weak_ptr<Value>> saved;  // in the order in which autograd saved tensors in it
  double flops = 0;
  double seconds = 0;
  bool replayable = true;
  // An input could not be had again when it ran. If the input has been saved since, the operator can be repeated.
  bool lacks_inputs = false;
  bool gathers = false;  // it takes a parameter whose page ranks may bring together

  template <typename Visit>
  void for_each_input(const Visit& visit) const {
    for (const Argument& argument : arguments) {
      for (const Tensor& tensor : argument.tensors()) {
        if (tensor.value) visit(tensor.value);
      }
    }
  }
};

}  // namespace zeropage::checkpointing::detail
