// A module that is constructed without memory for its parameters.
//
//   zeropage::DeferredModule<Gpt> deferred([&] { return Gpt(config); });
//   zeropage::DistributedDataParallel<Gpt> model(std::move(deferred), world, options);
//
// The constructor runs on every rank and makes no parameter; wrapping then computes one parameter after the other,
// keeps this rank's shard of it, and frees the rest. So a module larger than a rank's
// memory can be built; its values, and the random numbers drawn afterwards, are the plain
// constructor's bits (operators/construction_tape, which says what a constructor may not do: read
// values, keep tensors that are neither parameter nor buffer). Works at every stage.
//
// Lifetime: until it is wrapped, the module's tensors lie on the meta device and have no values.
#pragma once

#include <functional>
#include <memory>
#include <type_traits>

namespace zeropage {

namespace memory {
class ConstructionTape;
}

namespace detail {
std::shared_ptr<const memory::ConstructionTape> record_construction(
    const std::function<void()>& construct);
}

// M: a module holder (TORCH_MODULE) or a std::shared_ptr to a module.
template <typename M>
class DeferredModule {
 public:
  // Throws what `construct` throws, and for a constructor that needs values.
  explicit DeferredModule(const std::function<M()>& construct)
      : tape_(detail::record_construction([&] { module_ = construct(); })) {}
  DeferredModule(DeferredModule&&) noexcept = default;
  DeferredModule& operator=(DeferredModule&&) noexcept = default;

  M& module() { return module_; }
  const memory::ConstructionTape& tape() const { return *tape_; }

 private:
  template <typename Wrapped>
  friend class DistributedDataParallel;

  M module_{nullptr};
  std::shared_ptr<const memory::ConstructionTape> tape_;  // after the module, which it records
};

template <typename F>
DeferredModule(F) -> DeferredModule<std::invoke_result_t<F>>;

}  // namespace zeropage
