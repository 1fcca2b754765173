#include "zero/setup/memory_advice.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <c10/util/Exception.h>

#include "zero/tiers/nvme_storage.h"
#include "zeropage/bytes.h"

namespace zeropage::zero {
namespace {

using memory::format_bytes;
using memory::Kind;
using memory::MemoryShortage;
using memory::Tier;

// Where the size of a micro-batch is not known, its parts are counted instead.
constexpr int64_t kMostParts = 16;
constexpr size_t kMostLines = 5;
// How little recompute surely keeps: logits and inputs of products stay.
constexpr double kSurelyKept = 0.8;

int64_t times(int64_t bytes, double factor) {
  return static_cast<int64_t>(static_cast<double>(bytes) * factor);
}

// What forward and backward of the micro-batch that failed take beyond what was there before.
struct Activations {
  int64_t bytes = 0;
  std::string known_by;
};

// fresh_gradient_bytes: gradients of parameters that are among them, and as large for any micro-batch.
Activations activations_of(const StepFacts::Values& facts, const MemoryShortage& shortage,
                           int64_t fresh_gradient_bytes) {
  // A forward that ends leaves a loss and its gradient to come, and a backward the gradients of the next layers.
  constexpr double kOfForward = 1.5, kOfLoss = 1.25, kOfBackward = 1.1;
  constexpr int64_t kLikeLoss = 2, kLikeBackward = 1;
  const int64_t asked = is_of_activations(shortage.request.kind) ? shortage.request.asked_bytes : 0;
  const int64_t seen = std::max<int64_t>(
      0, std::max(shortage.activation_peak, shortage.on_device.activations() + asked) -
             facts.besides_bytes);
  if (facts.phase == StepFacts::Phase::kEnded) return {seen, "as that step's were"};
  int64_t of_last = 0;
  if (facts.whole_samples > 0 && facts.samples > 0) {
    if (facts.samples <= facts.whole_samples) {
      return {std::max(seen, facts.whole_bytes), "as in the last whole step"};
    }
    const double scale =
        static_cast<double>(facts.samples) / static_cast<double>(facts.whole_samples);
    of_last = times(std::max<int64_t>(0, facts.whole_bytes - fresh_gradient_bytes), scale);
  }
  const auto at_least = [&](int64_t bytes, const char* known_by) -> Activations {
    if (of_last > bytes) return {of_last, "by those of the last whole step, for more samples"};
    return {bytes, known_by};
  };
  if (facts.in_backward) {
    return at_least(std::max(times(seen, kOfBackward), seen + kLikeBackward * asked),
                    "as far as backward had come, and a part more");
  }
  if (facts.phase == StepFacts::Phase::kLoss) {
    return at_least(std::max(times(seen, kOfLoss), seen + kLikeLoss * asked),
                    "as far as the loss had come, and what its gradient takes");
  }
  return at_least(std::max(times(seen, kOfForward), seen + kLikeLoss * asked),
                  "as half more than the forward had made so far");
}

// A way to train, by what is changed.
struct Change {
  std::vector<std::string> words;
  Options options;
  int64_t pieces = 1;  // that a micro-batch of today is cut into
  bool recomputes = false;
};

class Advisor {
 public:
  Advisor(const LimitedModel& model, const StepFacts::Values& facts, const MemoryShortage& shortage)
      : model_(model),
        facts_(facts),
        shortage_(shortage),
        activations_(activations_of(facts, shortage, fresh_gradient_bytes())),
        besides_(std::min(facts.besides_bytes, shortage.on_device.activations())),
        limit_(shortage.limit_bytes()),
        counts_device_(model.device_is_host || shortage.request.device != c10::DeviceType::CPU),
        counts_host_tier_(shortage.request.counts_host_tier) {
    const int64_t computed = peak_of(as_it_is()).value_or(0);
    as_it_is_ = std::max(computed, limit_ + shortage.request.missing_bytes);
    unexplained_ = as_it_is_ - computed;
  }

  std::string text() {
    std::string lines = alone();
    const bool needs_several = lines.empty();
    if (needs_several) lines = together();
    const std::string needs =
        c10::str("a step as it is needs about ", format_bytes(as_it_is_), " of ",
                 format_bytes(limit_), " (activations counted ", activations_.known_by, ")");
    if (lines.empty()) return needs + nothing();
    return c10::str(
        needs,
        needs_several ? "; no single change makes it fit, but together do" : "; what makes it fit",
        ", the cheapest first:\n", lines);
  }

 private:
  // The bytes of a step that the shortage's limit counts.
  struct Fixed {
    int64_t on_device = 0;  // all but activations
    int64_t on_host = 0;
    int64_t of_accumulation = 0;
  };

  Change as_it_is() const { return {.options = model_.options}; }

  int64_t states(const BytePlan& plan) const {
    // States that are held already tell more than an optimizer of another part of the parameters.
    const memory::TierBytes one = plan.states(1);
    const int64_t of_one = one[Tier::kDevice].total() + one[Tier::kHost].total();
    const int64_t held =
        shortage_.on_device[Kind::kOptimizerState] + shortage_.on_host[Kind::kOptimizerState];
    const int64_t by_bytes = of_one == 0 ? 0 : (held + of_one - 1) / of_one;
    return facts_.states >= 0 ? facts_.states : by_bytes;
  }

  // Nothing for options that do not go together.
  std::optional<Fixed> fixed_of(const Options& options) const {
    try {
      validate(options);
      const BytePlan now(model_.layouts, model_.options, model_.places);
      const BytePlan plan(model_.layouts, options, model_.places);
      const memory::TierBytes held = plan.held(states(now));
      Fixed fixed{.on_device = held[Tier::kDevice].total() + plan.transient_bytes() + besides_,
                  .on_host = held[Tier::kHost].total()};
      // Segments of collectives, and buffers of what is offloaded already.
      fixed.on_device += shortage_.on_device[Kind::kStaging];
      const int64_t more_buffers = std::max<int64_t>(
          0, disk_buffer_bytes(plan, states(now)) - disk_buffer_bytes(now, states(now)));
      (model_.device_is_host ? fixed.on_device : fixed.on_host) += more_buffers;
      if (facts_.trains) {
        fixed.on_device += plan.gradient_bytes() + fresh_gradient_bytes();
      }
      if (model_.places.others.ranks > 1 && !shards_gradients(options)) {
        for (const PagePlan& page : plan.pages()) {
          const int64_t owned = page.owned.numel() * c10::elementSize(page.gradient_dtype);
          if (page.own_gradient_bytes > 0) fixed.of_accumulation += owned;
        }
      }
      return fixed;
    } catch (const c10::Error&) {
      return std::nullopt;
    }
  }

  // Through which what is on NVMe passes the host: for values, states and parameters three of the largest page.
  static int64_t disk_buffer_bytes(const BytePlan& plan, int64_t states) {
    int64_t parameters = 0, masters = 0, of_states = 0;
    for (const PagePlan& page : plan.pages()) {
      const memory::Breakdown& on_disk = page.held[Tier::kNvme];
      parameters = std::max(parameters, on_disk[Kind::kParameter]);
      masters = std::max(masters, on_disk[Kind::kMasterWeights]);
      if (page.optimizer_tier != Tier::kNvme) continue;
      of_states = std::max(of_states, page.state_bytes * states);
    }
    return NvmeStorage::kBuffers * (parameters + masters + of_states);
  }

  // What autograd has made of a parameter's gradient before it is added up: of the largest, twice.
  int64_t fresh_gradient_bytes() const {
    int64_t largest = 0;
    for (const PageLayout& page : model_.layouts) {
      for (const Slot& slot : page.slots) {
        largest = std::max<int64_t>(largest, slot.range.numel() * c10::elementSize(page.dtype));
      }
    }
    return 2 * largest;
  }

  int64_t most_pieces() const {
    return facts_.samples > 0 ? facts_.samples : activations_.bytes > 0 ? kMostParts : 1;
  }
  // Those of today's micro-batch, cut into so many.
  int64_t activations_in(int64_t pieces) const {
    if (facts_.samples <= 0) return activations_.bytes / pieces;
    const int64_t samples = (facts_.samples + pieces - 1) / pieces;
    return times(activations_.bytes,
                 static_cast<double>(samples) / static_cast<double>(facts_.samples));
  }

  bool accumulates(int64_t pieces) const {
    return facts_.trains && pieces * facts_.micro_steps > 1;
  }

  // On the device without activations; of a step.
  int64_t device_without_activations(const Fixed& fixed, int64_t pieces) const {
    return fixed.on_device + (accumulates(pieces) ? fixed.of_accumulation : 0);
  }

  int64_t counted(int64_t on_device, int64_t on_host) const {
    return (counts_device_ ? on_device : 0) + (counts_host_tier_ ? on_host : 0) + unexplained_;
  }
  int64_t room() const { return limit_ - limit_ / kForecastMarginPart; }

  // A budget of activations that the change leaves, besides what was there before.
  int64_t budget(const Fixed& fixed, int64_t pieces) const {
    return room() - counted(device_without_activations(fixed, pieces), fixed.on_host);
  }

  // Nothing where recompute would have to keep less than it surely can, or the options make no sense.
  std::optional<int64_t> peak_of(const Change& change) const {
    const auto fixed = fixed_of(change.options);
    if (!fixed) return std::nullopt;
    return peak_of(*fixed, change.pieces, change.recomputes);
  }
  std::optional<int64_t> peak_of(const Fixed& fixed, int64_t pieces, bool recomputes) const {
    const int64_t activations = activations_in(pieces);
    const int64_t device = device_without_activations(fixed, pieces);
    if (!recomputes) return counted(device + activations, fixed.on_host);
    if (!counts_device_ || budget(fixed, pieces) < times(activations, kSurelyKept)) {
      return std::nullopt;
    }
    return std::min(room(), counted(device + activations, fixed.on_host));
  }

  bool fits_other_limits(const Fixed& fixed, int64_t pieces) const {
    const int64_t device = device_without_activations(fixed, pieces) + activations_in(pieces);
    const int64_t host = fixed.on_host + (model_.device_is_host ? device : 0);
    const auto holds = [](int64_t bytes, int64_t limit) {
      return limit == memory::MemoryLimits::kNone || bytes <= limit - limit / kForecastMarginPart;
    };
    const bool of_host = counts_host_tier_;
    return (!of_host || holds(device, model_.limits.device_bytes)) &&
           (of_host || holds(host, model_.limits.host_bytes));
  }

  bool may_recompute() const {
    return counts_device_ && facts_.trains && !facts_.recomputes && activations_.bytes > 0;
  }

  std::string words_of_pieces(int64_t pieces) const {
    const std::string accumulation =
        facts_.trains ? c10::str(" with accumulation ", facts_.micro_steps * pieces) : "";
    const std::string norms = facts_.has_batch_norm && facts_.trains
                                  ? " (batch norms then see fewer samples at once)"
                                  : "";
    if (facts_.samples <= 0) {
      return c10::str("micro-batches of 1/", pieces, " of the samples", accumulation, norms);
    }
    return c10::str(facts_.trains ? "micro-batch " : "batch ", facts_.samples, " -> ",
                    (facts_.samples + pieces - 1) / pieces, accumulation, norms);
  }
  std::string words_of_recompute(const Fixed& fixed, int64_t pieces) const {
    return c10::str("recompute: zeropage::recompute(model, RecomputeOptions::budget(",
                    budget_bytes(fixed, pieces), ")) around forward and loss");
  }
  // The budget is of all activations: those from before the forward and gradients that autograd makes, too.
  int64_t budget_bytes(const Fixed& fixed, int64_t pieces) const {
    return budget(fixed, pieces) + besides_ + fresh_gradient_bytes();
  }

  // Options that hold less, in the order of cost.
  std::vector<Change> changes_of_options() const {
    std::vector<Change> changes;
    const auto add = [&](std::vector<std::string> words, const Options& options) {
      changes.push_back({.words = std::move(words), .options = options});
    };
    const int highest = model_.is_wrapped ? 3 : 1;
    const std::vector<HigherStage> stages = higher_stages(model_.options, highest);
    for (const HigherStage& higher : stages) add({higher.words()}, higher.options);
    const bool leaves = facts_.optimizer_can_leave && model_.options.update_by != UpdateBy::kClass;
    if (!leaves || model_.options.offload.optimizer == Tier::kNvme) return changes;
    const std::string on_host = "options.offload.optimizer = Tier::kHost";
    if (model_.options.offload.optimizer == Tier::kDevice) {
      add({on_host}, on_tier(model_.options, Tier::kHost));
      for (const HigherStage& higher : stages) {
        add({higher.words(), on_host}, on_tier(higher.options, Tier::kHost));
      }
    }
    if (!model_.is_wrapped) return changes;
    // Parameters leave at stage 3 alone.
    Options on_nvme = on_tier(stages.empty() ? model_.options : stages.back().options, Tier::kNvme);
    on_nvme.offload.parameters = Tier::kNvme;
    if (on_nvme.offload.nvme_directory.empty()) on_nvme.offload.nvme_directory = "DIR";
    add({c10::str(stages.empty() ? "" : stages.back().words() + " with ",
                  "options.offload.optimizer and options.offload.parameters = Tier::kNvme in "
                  "options.offload.nvme_directory")},
        on_nvme);
    return changes;
  }

  static Options on_tier(Options options, Tier tier) {
    options.offload.optimizer = tier;
    return options;
  }

  // A line, if the change makes the step fit.
  std::string line(const Change& change) const {
    const auto fixed = fixed_of(change.options);
    if (!fixed) return "";
    const auto peak = peak_of(*fixed, change.pieces, change.recomputes);
    if (!peak || *peak > room() || *peak >= as_it_is_ ||
        !fits_other_limits(*fixed, change.pieces)) {
      return "";
    }
    std::vector<std::string> words;
    if (change.pieces > 1) words.push_back(words_of_pieces(change.pieces));
    if (change.recomputes) words.push_back(words_of_recompute(*fixed, change.pieces));
    words.insert(words.end(), change.words.begin(), change.words.end());
    std::string text = "  ";
    for (size_t index = 0; index < words.size(); ++index) {
      text += (index == 0 ? "" : ", and ") + words[index];
    }
    return c10::str(text, ": ", format_bytes(as_it_is_ - *peak), " less, a peak of ",
                    change.recomputes ? "at most " : "about ", format_bytes(*peak), "\n");
  }

  // With as few pieces as suffice of these; change.pieces is how many.
  std::string line_of_pieces(Change& change, int64_t least, int64_t most) const {
    for (change.pieces = least; change.pieces <= most; ++change.pieces) {
      if (std::string text = line(change); !text.empty()) return text;
    }
    return "";
  }

  std::string alone() const {
    Change smaller = as_it_is();
    std::string lines = line_of_pieces(smaller, 2, most_pieces());
    if (may_recompute()) {
      Change change = as_it_is();
      change.recomputes = true;
      lines += line(change);
    }
    for (const Change& change : changes_of_options()) {
      if (change.words.size() == 1) lines += line(change);
    }
    return lines;
  }

  std::string together() const {
    std::vector<Change> changes = {as_it_is()};
    for (Change& change : changes_of_options()) changes.push_back(std::move(change));
    std::string lines;
    std::vector<Change> found;
    const auto add = [&](Change change, int64_t least, int64_t most) {
      if (found.size() == kMostLines) return;
      const std::string text = line_of_pieces(change, least, most);
      const bool is_more = std::any_of(found.begin(), found.end(), [&](const Change& cheaper) {
        return is_part_of(cheaper, change);
      });
      if (text.empty() || is_more) return;
      lines += text;
      found.push_back(std::move(change));
    };
    for (const Change& change : changes) {
      // One change alone has been tried.
      add(change, change.words.size() > 1 ? 1 : 2, most_pieces());
      Change again = change;
      again.recomputes = true;
      if (may_recompute()) add(again, change.words.empty() ? 2 : 1, most_pieces());
    }
    return lines;
  }

  // Whether the second changes all that the first does, as much or more.
  static bool is_part_of(const Change& first, const Change& second) {
    const auto has = [&](const std::string& word) {
      return std::find(second.words.begin(), second.words.end(), word) != second.words.end();
    };
    return first.pieces <= second.pieces && first.recomputes <= second.recomputes &&
           std::all_of(first.words.begin(), first.words.end(), has);
  }

  // What is the least that the best of all needs.
  std::string nothing() const {
    std::vector<Change> changes = {as_it_is()};
    for (Change& change : changes_of_options()) changes.push_back(std::move(change));
    int64_t least = as_it_is_;
    std::string best;
    for (const Change& change : changes) {
      const auto fixed = fixed_of(change.options);
      if (!fixed) continue;
      const int64_t pieces = most_pieces();
      int64_t peak = *peak_of(*fixed, pieces, /*recomputes=*/false);
      if (may_recompute()) {
        const int64_t activations = activations_in(pieces);
        peak -= activations - times(activations, kSurelyKept);
      }
      if (peak >= least) continue;
      least = peak;
      best = pieces > 1 ? words_of_pieces(pieces) : "";
      if (may_recompute()) best += best.empty() ? "recompute" : ", recompute";
      for (const std::string& words : change.words) best += (best.empty() ? "" : ", ") + words;
    }
    const std::string at_least =
        best.empty() ? std::string("; nothing that keeps the results makes it fit")
                     : c10::str("; nothing that keeps the results makes it fit: with ", best,
                                ", the least, it needs about ", format_bytes(least));
    return at_least +
           "; use more ranks, a lower precision (options.compute_dtype), or a higher limit\n";
  }

  const LimitedModel& model_;
  const StepFacts::Values& facts_;
  const MemoryShortage& shortage_;
  const Activations activations_;
  const int64_t besides_;
  const int64_t limit_;
  const bool counts_device_;
  const bool counts_host_tier_;
  int64_t as_it_is_ = 0;
  int64_t unexplained_ = 0;
};

}  // namespace

std::string advice_on_memory(const LimitedModel& model, const StepFacts::Values& facts,
                             const MemoryShortage& shortage) {
  return Advisor(model, facts, shortage).text();
}

}  // namespace zeropage::zero
