#include "tests/scripts/verdict.h"

#include <algorithm>
#include <sstream>

#include "tests/harness/disk_folder.h"
#include "tests/scripts/our_side.h"
#include "tests/scripts/plain_side.h"

namespace zeropage::scripts {
namespace {

bool has_any(const Script& script, bool (*is_it)(Does does)) {
  return std::any_of(script.actions.begin(), script.actions.end(),
                     [is_it](const Action& action) { return is_it(action.does); });
}

bool does_wrong(const Script& script) {
  return has_any(script, &is_wrong);
}

bool unfreezes(const Script& script) {
  return has_any(script, [](Does does) { return does == Does::kUnfreeze; });
}

// The one that the script is to be told by this error; null for other errors.
const Refusal* refusal_of(const Script& script, const std::string& error) {
  for (const Refusal& refusal : refusals()) {
    if (refusal.is_due(script) && error.find(refusal.words) != std::string::npos) return &refusal;
  }
  return nullptr;
}

bool is_in_fp32(const Script& script) {
  return !script.settings.front().is_double;
}

// Values near 1, of which a few steps are made: fp32 is far from half of this, a wrong factor is not. A moving
// average is kept in fp32.
double tolerance_of(const Script& script, const Observation& seen) {
  if (is_in_fp32(script)) return 2e-3;
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

bool diverged(const Observations& seen) {
  for (const Observation& observation : seen) {
    if (observation.value.numel() == 0) continue;
    const double most = observation.value.abs().max().item<double>();
    if (!(most < 1e3)) return true;
  }
  return false;
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
      // A step that follows no forward.
      {"did not when the wrapped module was called last", "docs/troubleshooting.md", &unfreezes},
  };
  return all;
}

Verdict compared(const Script& script, const Observations& expected, const Observations& got) {
  Verdict verdict;
  std::map<std::string, torch::Tensor> by_name;
  for (const Observation& seen : got) by_name[seen.what] = seen.value;
  for (const Observation& seen : expected) {
    const auto other = by_name.find(seen.what);
    if (other == by_name.end()) {
      return {Verdict::Is::kDifferent, seen.what + ": only LibTorch's run has it", verdict.steps};
    }
    const double scale = 1 + (seen.value.numel() == 0 ? 0 : seen.value.abs().max().item<double>());
    const bool alike =
        seen.value.sizes() == other->second.sizes() &&
        (seen.value.numel() == 0 || (seen.value - other->second).abs().max().item<double>() <=
                                        tolerance_of(script, seen) * scale);
    if (alike) continue;
    return {Verdict::Is::kDifferent,
            seen.what + ": expected " + words_of(seen.value) + ", got " + words_of(other->second),
            verdict.steps};
  }
  for (const Action& action : script.actions) verdict.steps += action.does == Does::kStep ? 1 : 0;
  return verdict;
}

Verdict verdict_of(const Script& script) {
  const Observations expected = PlainSide(script).see_all();
  if (diverged(expected)) return {Verdict::Is::kDiverged, "", 0};
  const testing::DiskFolder folder;
  const OurRun ours = run_ours(script, folder.path());
  if (!ours.error.empty()) {
    const Refusal* const refusal = refusal_of(script, ours.error);
    if (refusal != nullptr) return {Verdict::Is::kRefused, refusal->words, 0};
    return {Verdict::Is::kError, ours.error, 0};
  }
  return compared(script, expected, ours.seen);
}

Script shrunk(Script script, const std::function<bool(const Script&)>& is_still) {
  const auto try_it = [&](Script smaller) {
    if (!is_still(smaller)) return false;
    script = std::move(smaller);
    return true;
  };
  for (bool progress = true; progress;) {
    progress = false;
    for (size_t many = std::max<size_t>(script.actions.size() / 2, 1); many > 0; many /= 2) {
      for (size_t index = script.actions.size(); index-- > 0;) {
        if (index + many > script.actions.size()) continue;
        Script smaller = script;
        const auto first = smaller.actions.begin() + static_cast<std::ptrdiff_t>(index);
        smaller.actions.erase(first, first + static_cast<std::ptrdiff_t>(many));
        progress = try_it(std::move(smaller)) || progress;
      }
    }
    // From behind, so that what others are of keeps its place.
    for (size_t index = script.units.size(); script.units.size() > 1 && index-- > 0;) {
      Script smaller = script;
      smaller.units.erase(smaller.units.begin() + static_cast<std::ptrdiff_t>(index));
      bool is_used = false;
      for (Unit& unit : smaller.units) {
        if (unit.kind != Kind::kShared && unit.kind != Kind::kTied) continue;
        is_used = is_used || unit.of == static_cast<int>(index);
        if (unit.of > static_cast<int>(index)) --unit.of;
      }
      if (!is_used) progress = try_it(std::move(smaller)) || progress;
    }
    const auto simplify = [&](const auto& change) {
      Script smaller = script;
      change(smaller);
      if (to_text(smaller) != to_text(script)) progress = try_it(std::move(smaller)) || progress;
    };
    simplify([](Script& of) { of.groups = 1; });
    simplify([](Script& of) { of.optimizers = 1; });
    simplify([](Script& of) { of.rule = Rule::kSgd; });
    simplify([](Script& of) { of.settings.resize(1); });
    for (size_t index = 0; index < script.settings.size(); ++index) {
      const auto in_setting = [&](const auto& change) {
        simplify([&](Script& of) {
          if (index < of.settings.size()) change(of.settings[index]);
        });
      };
      in_setting([](Setting& of) { of.kept = Kept::kAll; });
      in_setting([](Setting& of) { of.shard_within = 0; });
      in_setting([](Setting& of) { of.tensor = 1; });
      in_setting([](Setting& of) { of.data = 1; });
      in_setting([](Setting& of) {
        of.data = 2;
        of.shard_within = 0;
      });
      in_setting([](Setting& of) { of.is_offloaded = false; });
      in_setting([](Setting& of) {
        of.stage = 0;
        of.shard_within = 0;
      });
      in_setting([](Setting& of) { of.page_bytes = 1 << 20; });
    }
    for (size_t index = 0; index < script.actions.size(); ++index) {
      simplify([&](Script& of) {
        if (index < of.actions.size()) of.actions[index].value = 1;
      });
    }
  }
  return script;
}

}  // namespace zeropage::scripts
