// Draws of operators that can be repeated although other threads draw meanwhile.
//
// Ranks that are threads of one process share LibTorch's default generator of the host. To put its state back, as
// a repetition otherwise does, would give other numbers: another rank draws in between. So where ranks are
// threads, an operator of a forward that is to be repeated draws from a generator of its own. Its seed is a number
// from the default generator, and the repetition has the same seed.
//
// Generators that a script gives to operators, and those of accelerators, which ranks do not share, are left as they are.
//
// Threads: scopes and what they give concern the calling thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>

namespace zeropage::operators {

// Gives seeds to the operators of a forward that draw from the host's default generator, in their order.
class DrawSeeds {
 public:
  DrawSeeds() = default;
  DrawSeeds(const DrawSeeds&) = delete;
  DrawSeeds& operator=(const DrawSeeds&) = delete;
  virtual ~DrawSeeds() = default;

  virtual uint64_t next(const c10::OperatorHandle& handle) = 0;

  // Those of the calling thread's innermost scope; null without one.
  static DrawSeeds* current();
};

// While it lives, the calling thread's operators have their seeds from `seeds`. It outlives the scope.
class DrawSeedsScope {
 public:
  explicit DrawSeedsScope(DrawSeeds& seeds);
  ~DrawSeedsScope();
  DrawSeedsScope(const DrawSeedsScope&) = delete;
  DrawSeedsScope& operator=(const DrawSeedsScope&) = delete;

 private:
  DrawSeeds* const before_;
};

// Whether a forward that is to be repeated has seeds for its draws: ranks are threads, or the forward around it has seeds.
bool draws_have_seeds();

// A seed for the operator that the thread is about to run: of the innermost scope, or, without one, a number
// that the default generator draws.
uint64_t next_seed(const c10::OperatorHandle& handle);

// What a forward's draws had for seeds. Its first run asks the scope around it, so that forwards nest.
struct SeedRecord {
  struct Draw {
    c10::OperatorHandle handle;
    uint64_t seed;
  };
  std::vector<Draw> draws;
};

class RecordedSeeds final : public DrawSeeds {
 public:
  // Made before its own scope begins. record: outlives it.
  explicit RecordedSeeds(SeedRecord& record) : record_(record), around_(current()) {}
  uint64_t next(const c10::OperatorHandle& handle) override;

 private:
  SeedRecord& record_;
  DrawSeeds* const around_;
};

class RepeatedSeeds final : public DrawSeeds {
 public:
  // who: names the forward in errors. record: outlives it.
  RepeatedSeeds(const SeedRecord& record, std::string who)
      : record_(record), who_(std::move(who)) {}
  // Throws where the first run had drawn with another operator, or not at all.
  uint64_t next(const c10::OperatorHandle& handle) override;

 private:
  const SeedRecord& record_;
  const std::string who_;
  size_t index_ = 0;
};

// Whether the operator may draw from a default generator of the host, rather than from one that it is given.
bool draws_by_default(const c10::OperatorHandle& handle, at::ArrayRef<c10::IValue> arguments);

// run_operator() (operators/operator_interceptor.h), with a generator of that seed for what it and the operators in it
// draw on the host. Throws for an operator of a library other than LibTorch that draws from the default generator by itself.
void run_seeded(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                torch::jit::Stack& stack, uint64_t seed);
// The same for an operator from outside an interceptor: OperatorHandle::callBoxed().
void call_seeded(const c10::OperatorHandle& handle, torch::jit::Stack& stack, uint64_t seed);

// run_operator(), seeded where a scope of seeds is in force and the operator draws by default.
void run_with_current_seeds(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                            torch::jit::Stack& stack);

}  // namespace zeropage::operators
