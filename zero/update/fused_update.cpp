#include "zero/update/fused_update.h"

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "optim/stretch_list.h"
#include "zero/update/fused_runs.h"
#include "zero/update/saved_runs.h"
#include "zeropage/optimizer.h"

namespace zeropage {
namespace {

// Parameters that lie one after the other, are in one group and have made as many steps are updated
// together: what lies between them is zero and stays so. So are those that lie elsewhere, as pieces that one
// call updates. Where states are smaller than fp32, or values are split, a run is updated by itself.
//
// Which of them a call updates follows from who has a gradient, which is the same at most steps. So calls are kept,
// and made anew where that, or what the runs are, has changed.
template <offload::HasFusedStep AlgorithmOptions>
class FusedUpdate final : public PageUpdate {
 public:
  explicit FusedUpdate(OwnedPart part) : part_(std::move(part)), runs_(part_), saved_(runs_) {}

  void add_groups(std::vector<OwnedGroup> groups) override { runs_.add_groups(std::move(groups)); }
  void set_options(size_t group, const torch::optim::OptimizerOptions& options) override {
    runs_.set_options(group, options);
  }
  void visit_states(StateAccess access, const VisitState& visit) override {
    saved_.visit_states(access, visit);
  }
  // Each shard counts its steps.
  void set_updates(int64_t /*updates*/) override {}

  bool reads_found_inf() const override { return true; }
  void uncount_step() override {
    if (!std::exchange(counts_last_step_, false)) return;
    for (FusedShard& shard : runs_.shards()) shard.steps -= shard.stepped_last ? 1 : 0;
  }

  void step(const at::Tensor& gradient, const HasGradient& has_gradient,
            const offload::GradientFactors& factors) override {
    const bool is_as_before = !note_gradients(has_gradient);
    if (!is_as_before) unfreeze();
    runs_.make_states();
    if (!is_as_before || calls_of_ != runs_.version()) make_calls();
    for (FusedShard& shard : runs_.shards()) shard.steps += shard.stepped_last ? 1 : 0;
    counts_last_step_ = true;
    for (const Call& call : calls_) update(call, gradient, factors);
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
    offload::StretchPieces pieces = {};  // of several
  };

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
      const bool is_packed =
          run.format != offload::StateFormat::kFp32 || part_.remainders.defined();
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

  offload::StretchPieces pieces_of(const std::vector<Part>& parts) const {
    std::vector<offload::StretchPiece> pieces;
    for (const Part& part : parts) {
      pieces.push_back({.begin = part.range.begin,
                        .first_state = runs_.first_state(runs_.all()[part.run], part.range),
                        .numel = part.range.numel()});
    }
    return {pieces, part_.values.device()};
  }

  void update(const Call& call, const at::Tensor& gradient,
              const offload::GradientFactors& factors) const {
    const Part& first = call.parts.front();
    const FusedRun& run = runs_.all()[first.run];
    const AlgorithmOptions& options = runs_.options(run);
    const bool is_one = call.parts.size() == 1;
    const auto of_parts = [&](const at::Tensor& flat) {
      if (!is_one || !flat.defined()) return flat;
      return flat.narrow(0, first.range.begin, first.range.numel());
    };
    offload::Stretch stretch{.values = of_parts(part_.values),
                             .gradient = of_parts(gradient),
                             .copy_out = of_parts(part_.copy_out),
                             .states = {},
                             .remainders = of_parts(part_.remainders),
                             .place = run.place,
                             .adopts_copy = part_.adopts_copy};
    for (size_t index = 0; index < offload::state_names(options).size(); ++index) {
      stretch.states.push_back(is_one ? runs_.states_of(run, first.range, index)
                                      : runs_.states_beside(run)[index]);
      if (run.format == offload::StateFormat::k8Bit) {
        stretch.scales.push_back(runs_.scales_of(run, index));
      }
    }
    const int64_t steps = runs_.shards()[first.shard].steps;
    if (is_one) {
      offload::fused_step(options, steps, stretch, factors);
    } else {
      offload::fused_step_of_pieces(options, steps, stretch, call.pieces, factors);
    }
  }

  const OwnedPart part_;
  FusedRuns<AlgorithmOptions> runs_;
  SavedRuns<AlgorithmOptions> saved_;
  std::vector<Call> calls_;  // of the last step
  uint64_t calls_of_ = 0;    // the version of the runs when they were made
  bool counts_last_step_ = false;
};

template <typename AlgorithmOptions>
std::shared_ptr<const FusedForm> form_of(const AlgorithmOptions& defaults) {
  return std::make_shared<const FusedForm>(
      FusedForm{.make =
                    [](OwnedPart part) {
                      return std::make_unique<FusedUpdate<AlgorithmOptions>>(std::move(part));
                    },
                .states = static_cast<int64_t>(offload::state_names(defaults).size())});
}

}  // namespace

namespace detail {

template <typename A>
std::shared_ptr<const FusedForm> fused_form(const typename OptimizerTraits<A>::Options& defaults) {
  return form_of(defaults);
}

}  // namespace detail

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

}  // namespace zeropage
