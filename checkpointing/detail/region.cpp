#include "checkpointing/detail/region.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/engine.h>

#include "checkpointing/detail/operator_facts.h"
#include "operators/operator_schema.h"
#include "operators/tensor_mark.h"
#include "zeropage/check.h"

namespace zeropage::checkpointing::detail {
namespace {

// Counts what the operators of a first run or of a repetition cost, and is shown what they read,
// write and make.
class OperatorObserver : public operators::OperatorInterceptor {
 public:
  void run(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
           torch::jit::Stack& stack) override {
    const OperatorFacts& facts = facts_of(handle);
    const auto arguments = torch::jit::last(stack, handle.schema().arguments().size());
    if (facts.is_composite || operators::is_replaced(handle, arguments)) {
      operators::run_operator_from_outside(handle, keys, stack);
      return;
    }
    const double of_this = flops_of(facts, arguments);
    before(facts, arguments);
    filled_.clear();
    for (const size_t index : facts.filled) add_tensors(arguments[index]);
    operators::run_with_current_seeds(handle, keys, stack);
    filled_.clear();
    flops += of_this;
    after(facts, torch::jit::last(stack, handle.schema().returns().size()));
  }

  virtual void before(const OperatorFacts& facts, at::ArrayRef<c10::IValue> arguments) = 0;
  virtual void after(const OperatorFacts& facts, at::ArrayRef<c10::IValue> results) = 0;

  // Whether the operator that runs will write the tensor, which autograd saves before.
  bool fills(const at::Tensor& tensor) const {
    return std::any_of(filled_.begin(), filled_.end(),
                       [&](const at::Tensor& filled) { return filled.is_alias_of(tensor); });
  }

  bool fills_any() const { return !filled_.empty(); }

  double flops = 0;

 private:
  void add_tensors(const c10::IValue& value) {
    for (at::Tensor& tensor : operators::tensors_in(value)) {
      if (tensor.defined() && tensor.has_storage()) filled_.push_back(std::move(tensor));
    }
  }

  std::vector<at::Tensor> filled_;
};

template <typename Visit>
void for_each_tensor(at::ArrayRef<c10::IValue> values, const Visit& visit) {
  for (const c10::IValue& value : values) {
    if (value.isTensor()) {
      visit(value.toTensor());
    } else if (value.isList()) {
      for (const at::Tensor& tensor : operators::tensors_in(value)) visit(tensor);
    }
  }
}

c10::Device place_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.device() : c10::Device(c10::kCPU);
}

// Once for each name: a frozen layer runs in every forward.
void warn_that_none_requires_a_gradient(const std::string& who) {
  static std::mutex mutex;
  static std::unordered_set<std::string> told;
  const std::lock_guard lock(mutex);
  if (!told.insert(who).second) return;
  TORCH_WARN(who,
             ": no result requires a gradient, so backward never comes here and nothing is saved; "
             "that is right behind frozen parameters alone, else let an input or a parameter "
             "require one");
}

}  // namespace

class Region::Packed final : public PackedTensor {
 public:
  Packed(std::shared_ptr<Region> region, size_t index)
      : region_(std::move(region)), index_(index) {}
  ~Packed() override { region_->forget(index_); }
  at::Tensor unpack() override { return region_->take(index_); }

 private:
  const std::shared_ptr<Region> region_;
  const size_t index_;
};

class Region::FirstRunHooks final : public SavedTensorHooks {
 public:
  // observer: of the first run, which these end with.
  FirstRunHooks(std::shared_ptr<Region> region, const OperatorObserver& observer)
      : region_(std::move(region)), observer_(observer) {}
  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) override {
    const std::lock_guard lock(region_->mutex_);
    return std::make_unique<Packed>(region_, region_->saved_.add(tensor, !observer_.fills(tensor)));
  }

 private:
  const std::shared_ptr<Region> region_;
  const OperatorObserver& observer_;
};

// Refuses what would give the repetition other values than the first run had.
class Region::RepetitionObserver final : public OperatorObserver {
 public:
  explicit RepetitionObserver(const Region& region) : region_(region) {}
  void before(const OperatorFacts& facts, at::ArrayRef<c10::IValue> arguments) override {
    if (facts.only_views) return;
    for_each_tensor(arguments, [&](const at::Tensor& tensor) {
      if (tensor.defined() && !region_.writes_.has_written(tensor)) {
        region_.captured_.check(tensor, region_.who());
      }
    });
  }
  void after(const OperatorFacts&, at::ArrayRef<c10::IValue>) override {
    if (stops_) throw EarlyStop();
  }
  // All tensors that are needed are there. Where the operator that runs has yet to write one of them, behind the operator.
  void stop() {
    stops_ = true;
    if (!fills_any()) throw EarlyStop();
  }

 private:
  const Region& region_;
  bool stops_ = false;
};

class Region::RepetitionHooks final : public SavedTensorHooks {
 public:
  RepetitionHooks(Region& region, RepetitionObserver& observer)
      : region_(region), observer_(observer) {}
  // The graph of a repetition may be used inside the function, by torch::autograd::grad.
  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) override {
    const bool enough = region_.saved_.compare_and_keep(count_++, tensor);
    if (enough && region_.options_.early_stop) observer_.stop();
    return keep(tensor, region_.who());
  }
  size_t count() const { return count_; }

 private:
  Region& region_;
  RepetitionObserver& observer_;
  size_t count_ = 0;
};

Region::Region(RegionOptions options)
    : options_(std::move(options)),
      ledger_(memory::Ledger::current()),
      account_(RecomputeAccount::of_this_thread()),
      modes_(ThreadModes::take()),
      saved_(who(), options_) {
  if (options_.preserve_random_state && operators::draws_have_seeds()) seeds_.emplace();
}

void Region::keep_input(const at::Tensor& tensor, const std::string& name) {
  if (tensor.defined()) captured_.leave_out(tensor);
  inputs_.keep(tensor, name, who());
  if (options_.preserve_random_state && (!random_ || !place_of(tensor).is_cpu())) {
    take_random_state(place_of(tensor));
  }
}

void Region::note_generator(const at::Generator& generator) {
  // Draws from the host's default one have seeds.
  if (seeds_ && generator == at::detail::getDefaultCPUGenerator()) return;
  random_->add(generator);
}

void Region::take_random_state(c10::Device place) {
  random_ = seeds_ ? RandomState::take_of_accelerator(place) : RandomState::take(place);
}

void Region::forget(size_t index) {
  const std::lock_guard lock(mutex_);
  saved_.forget(index);
}

void Region::forget_all() {
  const std::lock_guard lock(mutex_);
  saved_.drop_recomputed();
}

at::Tensor Region::take(size_t index) {
  const std::lock_guard lock(mutex_);
  // A node takes a tensor once; with retain_graph the next backward repeats the region again.
  at::Tensor tensor = saved_.take(index);
  if (tensor.defined()) return tensor;
  repeat();
  return saved_.take(index);
}

void Region::repeat() {
  if (torch::autograd::get_current_graph_task_id() >= 0) {
    // What this backward does not use must not stay.
    torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
      if (const auto region = weak.lock()) region->forget_all();
    });
  }
  const memory::LedgerScope ledger(ledger_);
  const memory::KindScope kind(memory::Kind::kRecompute);
  inputs_.check_unchanged(who());
  const auto start = std::chrono::steady_clock::now();
  RepetitionObserver observer(*this);
  inputs_.rewind();
  {
    const c10::InferenceMode no_inference(false);
    const ThreadModesScope modes(modes_);
    std::optional<RandomStateScope> random;
    if (random_) random.emplace(*random_);
    const OutsideWritesScope writes(writes_);
    const auto hooks = std::make_shared<RepetitionHooks>(*this, observer);
    const SavedTensorScope scope(hooks);
    const operators::InterceptorScope interceptor(&observer);
    std::optional<operators::RepeatedSeeds> seeds;
    std::optional<operators::DrawSeedsScope> seeds_scope;
    if (seeds_) seeds_scope.emplace(seeds.emplace(*seeds_, who()));
    bool stopped = false;
    try {
      function_([this] { return inputs_.next(); });
    } catch (const EarlyStop&) {
      stopped = true;
    } catch (c10::Error& error) {
      error.add_context(c10::str("repeating ", who(), " in backward"));
      throw;
    } catch (const std::exception& error) {
      std::throw_with_nested(
          c10::Error({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                     c10::str("repeating ", who(), " in backward: ", error.what())));
    }
    ZP_CHECK(stopped || hooks->count() == saved_.size(), who(), ": the repetition saves ",
             hooks->count(), " tensors, but the first run ", saved_.size(),
             "; a repetition must run the same operators on the same values");
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  account_->add_replay(observer.flops, seconds.count());
}

// Tells what it is shown to the region around this one too: that one's repetition runs all of it.
class RegionForward::Observer final : public OperatorObserver {
 public:
  explicit Observer(Region& region)
      : region_(region),
        around_(dynamic_cast<OperatorObserver*>(operators::OperatorInterceptor::current())) {}

  void before(const OperatorFacts& facts, at::ArrayRef<c10::IValue> arguments) override {
    if (around_ != nullptr) around_->before(facts, arguments);
    for (const c10::IValue& argument : arguments) {
      if (argument.isGenerator() && region_.random_) region_.note_generator(argument.toGenerator());
    }
    if (!facts.only_views) {
      for_each_tensor(arguments, [&](const at::Tensor& tensor) {
        if (tensor.defined() && !region_.writes_.has_made(tensor)) region_.captured_.note(tensor);
      });
    }
    if (facts.written.empty() && facts.statistics.empty()) return;
    for (const at::Tensor& tensor : written_tensors(facts, arguments)) {
      region_.writes_.before_write(tensor);
    }
  }
  void after(const OperatorFacts& facts, at::ArrayRef<c10::IValue> results) override {
    if (around_ != nullptr) around_->after(facts, results);
    if (facts.only_views) return;
    for_each_tensor(results, [&](const at::Tensor& tensor) { region_.writes_.made(tensor); });
  }

 private:
  Region& region_;
  OperatorObserver* const around_;
};

RegionForward::RegionForward(std::shared_ptr<Region> region)
    : region_(std::move(region)),
      observer_(std::make_unique<Observer>(*region_)),
      kind_(memory::current_kind() == memory::Kind::kRecompute ? memory::Kind::kRecompute
                                                               : memory::Kind::kActivation) {
  if (region_->options_.preserve_random_state && !region_->random_) {
    region_->take_random_state(c10::kCPU);
  }
  hooks_.emplace(std::make_shared<Region::FirstRunHooks>(region_, *observer_));
  interceptor_.emplace(observer_.get());
  if (region_->seeds_) seeds_scope_.emplace(seeds_.emplace(*region_->seeds_));
}

RegionForward::~RegionForward() = default;

void RegionForward::see_result(const at::Tensor& tensor) {
  any_requires_grad_ = any_requires_grad_ || (tensor.defined() && tensor.requires_grad());
}

void RegionForward::end() {
  seeds_scope_.reset();
  interceptor_.reset();
  hooks_.reset();
  region_->writes_.end_forward();
  region_->inputs_.end_forward();
  region_->account_->add_forward(observer_->flops);
  if (!any_requires_grad_) warn_that_none_requires_a_gradient(region_->who());
}

}  // namespace zeropage::checkpointing::detail
