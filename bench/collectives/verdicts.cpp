#include "bench/collectives/verdicts.h"

#include <algorithm>
#include <limits>

#include <c10/util/StringUtil.h>

#include "memory/bytes.h"

namespace collectives {
namespace {

using Figure = Claim::Figure;

constexpr int64_t kOfLatency = zeropage::memory::operator""_KiB(4);
constexpr int64_t kOfBandwidth = zeropage::memory::operator""_MiB(4);
constexpr int64_t kOfReduction = zeropage::memory::operator""_MiB(1);
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

const std::vector<Claim>& claims() {
  static const std::vector<Operation> slices = {Operation::kAllGather, Operation::kReduceScatter};
  static const std::vector<Claim> all = {
      {"shared", {"gloo", "c10d"}, slices, kOfBandwidth, kNoLimit, Figure::kBandwidthRatio, 4.0},
      {"shared", {"gloo", "c10d"}, slices, kOfLatency, kOfLatency, Figure::kTimeRatio, 0.25},
      {"gloo",
       {"c10d"},
       {Operation::kReduceScatter},
       kOfReduction,
       kNoLimit,
       Figure::kTimeRatio,
       0.6},
  };
  return all;
}

bool concerns(const Claim& claim, const Measurement& measurement) {
  const auto& operations = claim.operations;
  const Case& measured = measurement.measured;
  return measurement.transport == claim.transport && measured.bytes >= claim.least_bytes &&
         measured.bytes <= claim.most_bytes &&
         std::find(operations.begin(), operations.end(), measured.operation) != operations.end();
}

Spread ratio(Figure figure, const Spread& own_seconds, const Spread& other_seconds) {
  return figure == Figure::kTimeRatio ? quotient(own_seconds, other_seconds)
                                      : quotient(other_seconds, own_seconds);
}

std::optional<Finding> look(const Claim& claim, const Measurement& own,
                            const std::vector<Measurement>& all) {
  Finding finding{.ranks = own.ranks, .measured = own.measured};
  std::optional<Spread> quickest;
  for (const std::string& name : claim.others) {
    const Measurement* const other = find(all, own.ranks, own.measured, name);
    if (other == nullptr) return std::nullopt;
    finding.against.push_back(ratio(claim.figure, own.seconds, other->seconds));
    quickest = quickest ? least_of(*quickest, other->seconds) : other->seconds;
  }
  finding.figure = ratio(claim.figure, own.seconds, *quickest);
  const double median = finding.figure.median();
  finding.holds =
      claim.figure == Figure::kTimeRatio ? median <= claim.bound : median >= claim.bound;
  return finding;
}

}  // namespace

std::string Claim::words() const {
  std::string names;
  for (const Operation operation : operations) {
    names += (names.empty() ? "" : ", ") + std::string(name(operation));
  }
  std::string rivals;
  for (const std::string& other : others) rivals += (rivals.empty() ? "" : " and ") + other;
  return c10::str(transport, " against ", rivals, ", ", names, ", ",
                  zeropage::memory::format_bytes(least_bytes),
                  most_bytes == least_bytes ? "" : " and more", ": ",
                  figure == Figure::kTimeRatio ? "at most " : "at least ", bound, " x the ",
                  figure == Figure::kTimeRatio ? "time" : "bandwidth");
}

std::optional<bool> Verdict::holds() const {
  if (findings.empty()) return std::nullopt;
  return std::all_of(findings.begin(), findings.end(),
                     [](const Finding& finding) { return finding.holds; });
}

std::vector<Verdict> judge(const std::vector<Measurement>& all) {
  std::vector<Verdict> verdicts;
  for (const Claim& claim : claims()) {
    Verdict verdict{.claim = claim};
    for (const Measurement& measurement : all) {
      if (!concerns(claim, measurement)) continue;
      if (auto finding = look(claim, measurement, all)) {
        verdict.findings.push_back(*std::move(finding));
      }
    }
    verdicts.push_back(std::move(verdict));
  }
  return verdicts;
}

}  // namespace collectives
