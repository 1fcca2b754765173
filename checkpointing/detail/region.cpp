#include "checkpointing/detail/region.h"

#include <chrono>
#include <cstring>
#include <exception>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/engine.h>

#include "checkpointing/detail/operator_facts.h"
#include "checkpointing/detail/recorded_forward.h"
#include "memory/check.h"
#include "operators/operator_schema.h"
#include "operators/tensor_mark.h"

namespace zeropage::checkpointing::detail {
namespace {

// FNV-1a over 64-bit words of the values, in the tensor's own order of elements; 0 for bytes, which
// are work space of kernels.
uint64_t hash_of(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::kByte) return 0;
  const at::Tensor values = tensor.detach().contiguous().cpu();
  constexpr uint64_t kPrime = 0x100000001b3;
  uint64_t hash = 0xcbf29ce484222325;
  const auto* bytes = static_cast<const unsigned char*>(values.const_data_ptr());
  size_t left = values.nbytes();
  for (; left >= sizeof(uint64_t); left -= sizeof(uint64_t), bytes += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes, sizeof(word));
    hash = (hash ^ word) * kPrime;
  }
  for (; left > 0; --left, ++bytes) hash = (hash ^ *bytes) * kPrime;
  return hash;
}

std::string describe(at::ScalarType dtype, at::IntArrayRef sizes, c10::Device device) {
  return c10::str(dtype, " ", sizes, " on ", device);
}

// Counts what the operators of a first run or of a repetition cost, and is shown what they read,
// write and make.
class OperatorObserver : public memory::OperatorInterceptor {
 public:
  void run(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
           torch::jit::Stack& stack) override {
    const OperatorFacts& facts = facts_of(handle);
    const auto arguments = torch::jit::last(stack, handle.schema().arguments().size());
    if (facts.is_composite || memory::is_replaced(handle, arguments)) {
      memory::run_operator_from_outside(handle, keys, stack);
      return;
    }
    const double of_this = flops_of(facts, arguments);
    before(facts, arguments);
    memory::run_operator(handle, keys, stack);
    flops += of_this;
    after(facts, torch::jit::last(stack, handle.schema().returns().size()));
  }

  virtual void before(const OperatorFacts& facts, at::ArrayRef<c10::IValue> arguments) = 0;
  virtual void after(const OperatorFacts& facts, at::ArrayRef<c10::IValue> results) = 0;

  double flops = 0;
};

template <typename Visit>
void for_each_tensor(at::ArrayRef<c10::IValue> values, const Visit& visit) {
  for (const c10::IValue& value : values) {
    if (value.isTensor()) {
      visit(value.toTensor());
    } else if (value.isList()) {
      for (const at::Tensor& tensor : memory::tensors_in(value)) visit(tensor);
    }
  }
}

c10::Device place_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.device() : c10::Device(c10::kCPU);
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
  explicit FirstRunHooks(std::shared_ptr<Region> region) : region_(std::move(region)) {}
  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) override {
    return std::make_unique<Packed>(region_, region_->note_saved(tensor));
  }

 private:
  const std::shared_ptr<Region> region_;
};

class Region::RepetitionHooks final : public SavedTensorHooks {
 public:
  explicit RepetitionHooks(Region& region) : region_(region) {}
  // The graph of a repetition may be used inside the function, by torch::autograd::grad.
  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) override {
    const bool enough = region_.compare_and_keep(count_++, tensor);
    if (enough && region_.options_.early_stop) throw EarlyStop();
    return keep(tensor, region_.who());
  }
  size_t count() const { return count_; }

 private:
  Region& region_;
  size_t count_ = 0;
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
  void after(const OperatorFacts&, at::ArrayRef<c10::IValue>) override {}

 private:
  const Region& region_;
};

Region::Region(RegionOptions options)
    : options_(std::move(options)),
      ledger_(memory::Ledger::current()),
      account_(RecomputeAccount::of_this_thread()),
      enclosing_(SavedTensorScope::current()),
      modes_(ThreadModes::take()) {}

void Region::keep_input(const at::Tensor& tensor, const std::string& name) {
  Input input{.name = name};
  if (tensor.defined()) {
    captured_.leave_out(tensor);
    input.requires_grad = tensor.requires_grad();
    input.is_leaf = tensor.is_leaf();
    if (enclosing_) {
      input.packed = enclosing_->pack(tensor);
    } else {
      // An alias with a version of its own: a repetition may change it in place and put it back.
      input.packed = keep(tensor.variable_data(), who());
      input.checked = tensor.detach();
    }
  }
  if (options_.preserve_random_state && (!random_ || !place_of(tensor).is_cpu())) {
    random_ = RandomState::take(place_of(tensor));
  }
  inputs_.push_back(std::move(input));
}

at::Tensor Region::next_input() {
  Input& input = inputs_.at(next_input_++);
  if (!input.packed) return {};
  at::Tensor tensor = input.packed->unpack().variable_data();
  if (!input.requires_grad) return tensor;
  if (input.is_leaf) {
    tensor.requires_grad_();
  } else {
    attach_to_nothing(tensor);
  }
  return tensor;
}

size_t Region::note_saved(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  saved_.push_back({.sizes = tensor.sizes().vec(),
                    .dtype = tensor.scalar_type(),
                    .device = tensor.device(),
                    .hash = options_.check_values ? hash_of(tensor) : 0});
  return saved_.size() - 1;
}

void Region::forget(size_t index) {
  const std::lock_guard lock(mutex_);
  saved_[index].wanted = false;
  saved_[index].recomputed.reset();
}

void Region::forget_all() {
  const std::lock_guard lock(mutex_);
  for (Saved& saved : saved_) saved.recomputed.reset();
}

at::Tensor Region::take(size_t index) {
  const std::lock_guard lock(mutex_);
  if (!saved_[index].recomputed.defined()) repeat();
  // A node takes a tensor once; with retain_graph the next backward repeats the region again.
  return std::exchange(saved_[index].recomputed, at::Tensor());
}

bool Region::compare_and_keep(size_t index, const at::Tensor& tensor) {
  const auto other_forward =
      "; a repetition must run the same operators on the same values: give the region what its "
      "function depends on as arguments, and let it draw from the default generators";
  ZP_CHECK(index < saved_.size(), who(), ": the repetition saves more tensors than the first run, ",
           saved_.size(), ": the next is ",
           describe(tensor.scalar_type(), tensor.sizes(), tensor.device()), other_forward);
  Saved& saved = saved_[index];
  if (options_.check_geometry) {
    const bool same = saved.sizes == tensor.sizes() && saved.dtype == tensor.scalar_type() &&
                      saved.device == tensor.device();
    ZP_CHECK(same, who(), ": saved tensor ", index, " of ", saved_.size(),
             " differs in the repetition: expected ",
             describe(saved.dtype, saved.sizes, saved.device), ", got ",
             describe(tensor.scalar_type(), tensor.sizes(), tensor.device()), other_forward);
  }
  ZP_CHECK(!options_.check_values || hash_of(tensor) == saved.hash, who(), ": saved tensor ", index,
           " of ", saved_.size(), ", ", describe(saved.dtype, saved.sizes, saved.device),
           ", has other values in the repetition", other_forward);
  if (saved.wanted) saved.recomputed = tensor.detach();
  for (size_t later = index + 1; later < saved_.size(); ++later) {
    if (saved_[later].wanted) return false;
  }
  return true;
}

void Region::check_inputs() const {
  for (const Input& input : inputs_) {
    if (!input.checked.defined() || input.checked.is_inference()) continue;
    ZP_CHECK(
        input.checked._version() == input.version, who(), ": ", input.name, " of sizes ",
        input.checked.sizes(), " was changed in place after the region (version ", input.version,
        " then, ", input.checked._version(),
        " now), so it cannot be repeated; change a clone, or run backward() before it changes");
  }
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
  check_inputs();
  const auto start = std::chrono::steady_clock::now();
  RepetitionObserver observer(*this);
  next_input_ = 0;
  {
    const c10::InferenceMode no_inference(false);
    const ThreadModesScope modes(modes_);
    std::optional<RandomStateScope> random;
    if (random_) random.emplace(*random_);
    const OutsideWritesScope writes(writes_);
    const auto hooks = std::make_shared<RepetitionHooks>(*this);
    const SavedTensorScope scope(hooks);
    const memory::InterceptorScope interceptor(&observer);
    bool stopped = false;
    try {
      function_([this] { return next_input(); });
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
        around_(dynamic_cast<OperatorObserver*>(memory::OperatorInterceptor::current())) {}

  void before(const OperatorFacts& facts, at::ArrayRef<c10::IValue> arguments) override {
    if (around_ != nullptr) around_->before(facts, arguments);
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
    region_->random_ = RandomState::take(c10::kCPU);
  }
  hooks_.emplace(std::make_shared<Region::FirstRunHooks>(region_));
  interceptor_.emplace(observer_.get());
}

RegionForward::~RegionForward() = default;

void RegionForward::see_result(const at::Tensor& tensor) {
  any_requires_grad_ = any_requires_grad_ || (tensor.defined() && tensor.requires_grad());
}

void RegionForward::end() {
  interceptor_.reset();
  hooks_.reset();
  region_->writes_.end_forward();
  for (Region::Input& input : region_->inputs_) {
    if (input.checked.defined() && !input.checked.is_inference()) {
      input.version = input.checked._version();
    }
  }
  region_->account_->add_forward(observer_->flops);
  if (!any_requires_grad_) {
    TORCH_WARN(
        region_->who(),
        ": no result requires a gradient, so backward never comes here and nothing is saved; "
        "does an input or a parameter require one?");
  }
}

}  // namespace zeropage::checkpointing::detail
