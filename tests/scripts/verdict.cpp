#include "tests/scripts/verdict.h"

#include <algorithm>
#include <map>
#include <set>
#include <sstream>

#include "tests/harness/disk_folder.h"
#include "tests/scripts/our_side.h"
#include "tests/scripts/plain_side.h"
#include "tests/scripts/twin.h"

namespace zeropage::scripts {
namespace {

bool has_any(const Script& script, bool (*is_it)(Does does)) {
  return std::any_of(script.actions.begin(), script.actions.end(),
                     [is_it](const Action& action) { return is_it(action.does); });
}

bool does_wrong(const Script& script) {
  return has_any(script, &is_wrong);
}

bool retains(const Script& script) {
  return has_any(script, [](Does does) { return does == Does::kBackwardTwice; });
}

bool clips_in_pipelines(const Script& script) {
  return script.has_pipelines && has_any(script, [](Does does) { return does == Does::kClip; });
}

bool is_world_invariant(const Script& script) {
  return script.is_world_invariant;
}

bool offloads(const Script& script) {
  return std::any_of(script.settings.begin(), script.settings.end(),
                     [](const Setting& setting) { return setting.optimizer != Tier::kDevice; });
}

bool has_groups(const Script& script) {
  return std::any_of(script.settings.begin(), script.settings.end(),
                     [](const Setting& setting) { return setting.shard_within > 0; });
}

bool unfreezes(const Script& script) {
  return has_any(script, [](Does does) { return does == Does::kUnfreeze; });
}

// At stage 3 ranks would repeat different operators.
bool recomputes_other_routes(const Script& script) {
  if (!has(script, Kind::kTouched)) return false;
  return std::any_of(script.settings.begin(), script.settings.end(), [](const Setting& setting) {
    return setting.stage == 3 && setting.kept == Kept::kRecompute;
  });
}

// The one that the script is to be told by this error; null for other errors.
const Refusal* refusal_of(const Script& script, const std::string& error) {
  for (const Refusal& refusal : refusals()) {
    if (refusal.is_due(script) && error.find(refusal.words) != std::string::npos) return &refusal;
  }
  return nullptr;
}

// Values near 1, of which a few steps are made: fp32 is far from half of this, a wrong factor is not. A moving
// average is kept in fp32.
double tolerance_of(const Script& script, const Observation& seen) {
  if (script.beside == Beside::kTwin) return 0;
  if (script.values != Values::kDouble) return 2e-3;
  return seen.what.find("average") == std::string::npos ? 1e-7 : 1e-5;
}

std::string words_of(const torch::Tensor& values) {
  std::ostringstream out;
  const torch::Tensor flat = values.reshape({-1});
  for (int64_t index = 0; index < std::min<int64_t>(flat.numel(), 4); ++index) {
    out << (index > 0 ? ", " : "") << flat[index].item<double>();
  }
  return out.str() + (flat.numel() > 4 ? ", ..." : "");
}

bool are_alike(const torch::Tensor& expected, const torch::Tensor& got, double tolerance) {
  if (expected.sizes() != got.sizes()) return false;
  if (expected.numel() == 0) return true;
  const double scale = 1 + expected.abs().max().item<double>();
  return (expected - got).abs().max().item<double>() <= tolerance * scale;
}

bool diverged(const Observations& seen) {
  for (const Observation& observation : seen) {
    if (observation.value.numel() == 0) continue;
    const double most = observation.value.abs().max().item<double>();
    if (!(most < 1e3)) return true;
  }
  return false;
}

// Each that tells more than that another rank has ended must be due.
Verdict of_errors(const Script& script, const std::vector<std::string>& errors) {
  const Refusal* known = nullptr;
  for (const std::string& error : errors) {
    const Refusal* const refusal = refusal_of(script, error);
    if (refusal == nullptr && (!is_a_consequence(error) || &error == &errors.front())) {
      return {Verdict::Is::kError, error, 0};
    }
    if (known == nullptr) known = refusal;
  }
  return {Verdict::Is::kRefused, known->words, 0};
}

}  // namespace

const std::vector<Refusal>& refusals() {
  static const std::vector<Refusal> all = {
      {"ranks must have this alike", "docs/troubleshooting.md", &does_wrong},
      {"is out of step", "docs/troubleshooting.md", &does_wrong},
      // Ranks pair the n-th step of each, so what one left out is missed at the end where nothing tells steps apart.
      {"it let its world go", "docs/troubleshooting.md", &does_wrong},
      {"did not answer within", "docs/troubleshooting.md", &does_wrong},
      {"was changed while the model had the average", "docs/troubleshooting.md", &does_wrong},
      // The fused loss.
      {"expected one backward, got a second one over a retained graph", "docs/troubleshooting.md",
       &retains},
      // LibTorch's clip on a stage, of which another has no gradients.
      {"have been multiplied by", "docs/troubleshooting.md", &clips_in_pipelines},
      // Gradients that are scaled between two micro-batches.
      {"between the micro-batches of a step is of the last one alone", "docs/troubleshooting.md",
       &is_world_invariant},
      {"is looked at between the micro-batches of a step", "docs/troubleshooting.md", &offloads},
      {"in the middle of an accumulation it is a sum over the 2 ranks of a group alone",
       "docs/troubleshooting.md", &has_groups},
      {"expected no Recompute around a forward whose parameters are sharded", "docs/experts.md",
       &recomputes_other_routes},
      // A step that follows no forward.
      {"did not when the wrapped module was called last", "docs/troubleshooting.md", &unfreezes},
  };
  return all;
}

Verdict compared(const Script& script, const Observations& expected, const Observations& got) {
  Verdict verdict;
  // Both ends of a pipeline have what is tied.
  std::multimap<std::string, torch::Tensor> by_name;
  for (const Observation& seen : got) by_name.emplace(seen.what, seen.value);
  for (const Observation& seen : expected) {
    const auto [first, last] = by_name.equal_range(seen.what);
    if (first == last) {
      return {Verdict::Is::kDifferent, seen.what + ": only the other run has it", verdict.steps};
    }
    for (auto other = first; other != last; ++other) {
      if (are_alike(seen.value, other->second, tolerance_of(script, seen))) continue;
      return {Verdict::Is::kDifferent,
              seen.what + ": expected " + words_of(seen.value) + ", got " + words_of(other->second),
              verdict.steps};
    }
  }
  std::set<std::string> known;
  for (const Observation& seen : expected) known.insert(seen.what);
  for (const Observation& seen : got) {
    if (known.contains(seen.what)) continue;
    return {Verdict::Is::kDifferent, seen.what + ": the other run does not have it", verdict.steps};
  }
  for (const Action& action : script.actions) verdict.steps += action.does == Does::kStep ? 1 : 0;
  return verdict;
}

Verdict verdict_of(const Script& script) {
  const testing::DiskFolder folder;
  Observations expected;
  if (script.beside == Beside::kTwin) {
    OurRun plainer = run_ours(twin_of(script), folder.path());
    if (!plainer.errors.empty()) return of_errors(script, plainer.errors);
    expected = std::move(plainer.seen);
  } else {
    expected = PlainSide(script).see_all();
  }
  if (diverged(expected)) return {Verdict::Is::kDiverged, "", 0};
  const testing::DiskFolder other_folder;
  const OurRun ours = run_ours(script, other_folder.path());
  if (!ours.errors.empty()) return of_errors(script, ours.errors);
  return compared(script, expected, ours.seen);
}

}  // namespace zeropage::scripts
