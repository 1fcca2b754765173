#include "zero/update/fused_update.h"

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "optim/stretch_list.h"
#include "zero/update/factored_update.h"
#include "zero/update/fused_runs.h"
#include "zero/update/saved_runs.h"
#include "zero/update/second_pass.h"
#include "zeropage/adafactor.h"
#include "zeropage/lamb.h"
#include "zeropage/muon.h"
#include "zeropage/optimizer.h"

namespace zeropage::zero {
namespace {

// Parameters that lie one after the other, are in one group and have made as many steps are updated
// together: what lies between them is zero and stays so. So are those that lie elsewhere, as pieces that one
// call updates. Where states are smaller than fp32, or values are split, a run is updated by itself.
//
// Which of them a call updates follows from who has a gradient, which is the same at most steps. So calls are kept,
// and made anew where that, or what the runs are, has changed.
//
// Groups that read more of a tensor than an element have two passes. Their calls are made in both, the second time
// parameter by parameter.
template <optim::HasFusedStep AlgorithmOptions>
class FusedUpdate final : public PageUpdate {
 public:
  FusedUpdate(OwnedPart part, std::shared_ptr<const optim::TensorForm> tensors)
      : part_(std::move(part)), tensors_(std::move(tensors)), runs_(part_), saved_(runs_) {}

  void add_groups(std::vector<OwnedGroup> groups) override { runs_.add_groups(std::move(groups)); }
  void set_options(size_t group, const torch::optim::OptimizerOptions& options) override {
    runs_.set_options(group, options);
  }
  void visit_states(StateAccess access, const VisitState& visit) override {
    saved_.visit_states(access, visit);
  }
  void visit_memory(const VisitMemory& visit) override {
    runs_.visit_memory(visit);
    // Their tables are on a CUDA device.
    calls_.clear();
    runs_.note_loaded();
  }
  // Each shard counts its steps.
  void set_updates(int64_t /*updates*/) override {}

  // What is between two passes does not.
  bool reads_found_inf() const override { return tensors_ == nullptr; }
  void uncount_step() override {
    if (!std::exchange(counts_last_step_, false)) return;
    for (FusedShard& shard : runs_.shards()) shard.steps -= shard.stepped_last ? 1 : 0;
  }

  void step(const at::Tensor& gradient, const HasGradient& has_gradient,
            const optim::GradientFactors& factors, const Directions& directions) override {
    if (!std::exchange(is_begun_, false)) begin(has_gradient);
    for (const Call& call : calls_) {
      if (reads(call) == UpdateReads::kElement) {
        update(call, gradient, factors);
      } else {
        descend(call, directions);
      }
    }
  }

  void make_directions(const at::Tensor& gradient, const HasGradient& has_gradient,
                       const optim::GradientFactors& factors, const at::Tensor& directions,
                       const std::function<void()>& on_values) override {
    begin(has_gradient);
    is_begun_ = true;
    for (const Call& call : calls_) {
      if (reads(call) == UpdateReads::kSums) copy_values(call, directions);
    }
    on_values();
    for (const Call& call : calls_) {
      if (reads(call) == UpdateReads::kElement) continue;
      run(call, stretch_of(call, gradient, directions), factors);
    }
  }

 private:
  // Shards of a run that follow each other and have made as many steps.
  struct Part {
    size_t run;
    size_t shard;  // the first one
    Range range;   // in the owned part
  };
  struct Call {
    std::vector<Part> parts;
    optim::StretchPieces pieces = {};  // of several
  };

  // A step: counts it, and makes its calls.
  void begin(const HasGradient& has_gradient) {
    const bool is_as_before = !note_gradients(has_gradient);
    if (!is_as_before) unfreeze();
    runs_.make_states();
    if (!is_as_before || calls_of_ != runs_.version()) make_calls();
    for (FusedShard& shard : runs_.shards()) shard.steps += shard.stepped_last ? 1 : 0;
    counts_last_step_ = true;
  }

  // Whether another parameter has one, or has none, than at the last step.
  bool note_gradients(const HasGradient& has_gradient) {
    bool changed = false;
    for (FusedShard& shard : runs_.shards()) {
      const bool has = has_gradient(shard.parameter);
      changed |= has != shard.stepped_last;
      shard.stepped_last = has;
    }
    return changed;
  }

  void unfreeze() {
    for (const FusedShard& shard : runs_.shards()) {
      if (shard.stepped_last) runs_.unfreeze(shard.run);
    }
  }

  void make_calls() {
    calls_.clear();
    std::map<std::pair<size_t, int64_t>, size_t> known;  // by their states' block and their steps
    for (const Part& part : parts()) {
      const FusedRun& run = runs_.all()[part.run];
      const bool is_packed = run.format != StateFormat::kFp32 || part_.remainders.defined();
      const std::pair key(*run.block, runs_.shards()[part.shard].steps);
      if (is_packed || known.emplace(key, calls_.size()).second) {
        calls_.push_back({.parts = {part}});
      } else {
        calls_[known.at(key)].parts.push_back(part);
      }
    }
    for (Call& call : calls_) {
      if (call.parts.size() > 1) call.pieces = pieces_of(call.parts);
    }
    calls_of_ = runs_.version();
  }

  // The parts of all shards that are stepped.
  std::vector<Part> parts() const {
    std::vector<Part> parts;
    const std::vector<FusedShard>& shards = runs_.shards();
    for (size_t index = 0; index < shards.size(); ++index) {
      const FusedShard& shard = shards[index];
      if (!shard.stepped_last) continue;
      const bool follows = !parts.empty() && parts.back().run == shard.run &&
                           shards[index - 1].stepped_last && shards[index - 1].steps == shard.steps;
      if (follows) {
        parts.back().range.end = shard.range.end;
      } else {
        parts.push_back({.run = shard.run, .shard = index, .range = shard.range});
      }
    }
    return parts;
  }

  optim::StretchPieces pieces_of(const std::vector<Part>& parts) const {
    std::vector<optim::StretchPiece> pieces;
    for (const Part& part : parts) {
      pieces.push_back({.begin = part.range.begin,
                        .first_state = runs_.first_state(runs_.all()[part.run], part.range),
                        .numel = part.range.numel()});
    }
    return {pieces, part_.values.device()};
  }

  const AlgorithmOptions& options_of(const Call& call) const {
    return runs_.options(runs_.all()[call.parts.front().run]);
  }

  UpdateReads reads(const Call& call) const {
    return tensors_ ? tensors_->reads(options_of(call)) : UpdateReads::kElement;
  }

  void update(const Call& call, const at::Tensor& gradient,
              const optim::GradientFactors& factors) const {
    optim::Stretch stretch = stretch_of(call, gradient, part_.values);
    const auto of_parts = [&](const at::Tensor& flat) { return of_call(call, flat); };
    stretch.copy_out = of_parts(part_.copy_out);
    stretch.remainders = of_parts(part_.remainders);
    stretch.adopts_copy = part_.adopts_copy;
    run(call, stretch, factors);
  }

  // A single part's own, or all.
  static at::Tensor of_call(const Call& call, const at::Tensor& flat) {
    if (call.parts.size() > 1 || !flat.defined()) return flat;
    const Range& range = call.parts.front().range;
    return flat.narrow(0, range.begin, range.numel());
  }

  // values: [owned numel], what the call writes.
  optim::Stretch stretch_of(const Call& call, const at::Tensor& gradient,
                            const at::Tensor& values) const {
    const Part& first = call.parts.front();
    const FusedRun& run = runs_.all()[first.run];
    const bool is_one = call.parts.size() == 1;
    optim::Stretch stretch{.values = of_call(call, values),
                           .gradient = of_call(call, gradient),
                           .copy_out = {},
                           .states = {},
                           .place = run.place};
    for (size_t index = 0; index < optim::state_names(runs_.options(run)).size(); ++index) {
      stretch.states.push_back(is_one ? runs_.states_of(run, first.range, index)
                                      : runs_.states_beside(run)[index]);
      if (run.format == StateFormat::k8Bit) {
        stretch.scales.push_back(runs_.scales_of(run, index));
      }
    }
    return stretch;
  }

  void run(const Call& call, const optim::Stretch& stretch,
           const optim::GradientFactors& factors) const {
    const int64_t steps = runs_.shards()[call.parts.front().shard].steps;
    if (call.parts.size() == 1) {
      optim::fused_step(options_of(call), steps, stretch, factors);
    } else {
      optim::fused_step_of_pieces(options_of(call), steps, stretch, call.pieces, factors);
    }
  }

  // visit(shard) for each that the call updates.
  template <typename Visit>
  void for_each_shard(const Call& call, const Visit& visit) const {
    for (const Part& part : call.parts) {
      for (size_t index = part.shard; index < runs_.shards().size(); ++index) {
        const FusedShard& shard = runs_.shards()[index];
        if (shard.run != part.run || shard.range.begin >= part.range.end) break;
        visit(shard);
      }
    }
  }

  void copy_values(const Call& call, const at::Tensor& to) const {
    for_each_shard(call,
                   [&](const FusedShard& shard) { copy_exact_values(part_, shard.range, to); });
  }

  void descend(const Call& call, const Directions& directions) const {
    if constexpr (optim::HasTwoPasses<AlgorithmOptions>) {
      const optim::UpdateRule rule = optim::descent_of(options_of(call));
      for_each_shard(call, [&](const FusedShard& shard) {
        descend_along(part_, shard.range, rule, shard.steps, directions.values,
                      directions.factor(shard.parameter));
      });
    }
  }

  const OwnedPart part_;
  const std::shared_ptr<const optim::TensorForm> tensors_;  // null: all groups have one pass
  FusedRuns<AlgorithmOptions> runs_;
  SavedRuns<AlgorithmOptions> saved_;
  std::vector<Call> calls_;  // of the last step
  uint64_t calls_of_ = 0;    // the version of the runs when they were made
  bool counts_last_step_ = false;
  bool is_begun_ = false;  // a step whose first pass was made
};

template <typename AlgorithmOptions>
std::shared_ptr<const optim::TensorForm> tensor_form() {
  if constexpr (std::is_same_v<AlgorithmOptions, MuonOptions>) return optim::muon_form();
  if constexpr (std::is_same_v<AlgorithmOptions, LambOptions>) return optim::lamb_form();
  return nullptr;
}

template <typename AlgorithmOptions>
std::shared_ptr<const FusedForm> form_of(const AlgorithmOptions& defaults) {
  const auto tensors = tensor_form<AlgorithmOptions>();
  return std::make_shared<const FusedForm>(FusedForm{
      .make =
          [tensors](OwnedPart part) {
            return std::make_unique<FusedUpdate<AlgorithmOptions>>(std::move(part), tensors);
          },
      .states = static_cast<int64_t>(optim::state_names(defaults).size()),
      .tensors = tensors});
}

}  // namespace

}  // namespace zeropage::zero

namespace zeropage::detail {

template <typename A>
std::shared_ptr<const zero::FusedForm> fused_form(
    const typename OptimizerTraits<A>::Options& defaults) {
  if constexpr (std::is_same_v<A, Adafactor>) {
    return zero::factored_form();
  } else {
    return zero::form_of(defaults);
  }
}

}  // namespace zeropage::detail

namespace zeropage::zero {

namespace {

template <typename... A>
auto fused_forms(detail::ClassList<A...> /*classes*/) {
  return std::tuple(&detail::fused_form<A>...);
}
// Instantiates them.
[[maybe_unused]] const auto kFusedForms = fused_forms(detail::ClassesWithFusedForm());

std::string name_of_class(const std::string& qualified) {
  return qualified.substr(qualified.rfind(':') + 1);
}

template <typename... A>
std::string joined_names(detail::ClassList<A...> /*classes*/) {
  const std::vector<std::string> names = {name_of_class(c10::demangle_type<A>())...};
  std::string text;
  for (size_t index = 0; index < names.size(); ++index) {
    if (index > 0) text += index + 1 < names.size() ? ", " : " and ";
    text += names[index];
  }
  return text;
}

}  // namespace

std::string names_with_fused_form() {
  return joined_names(detail::ClassesWithFusedForm());
}

}  // namespace zeropage::zero
