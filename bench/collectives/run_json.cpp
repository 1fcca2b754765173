#include "bench/collectives/run_json.h"

#include <algorithm>
#include <string>

#include <nlohmann/json.hpp>

#include "bench/collectives/figures_json.h"

namespace collectives {
namespace {

using Json = nlohmann::json;

Operation operation_of(const std::string& text) {
  const auto* const at = std::find(kOperationNames.begin(), kOperationNames.end(), text);
  return static_cast<Operation>(at - kOperationNames.begin());
}

Json measurement_json(const Measurement& measurement) {
  return {{"ranks", measurement.ranks},
          {"operation", name(measurement.measured.operation)},
          {"bytes", measurement.measured.bytes},
          {"transport", measurement.transport},
          {"seconds", spread_json(measurement.seconds)},
          {"iterations", measurement.iterations}};
}

Measurement measurement_from_json(const Json& json) {
  return {.ranks = json.at("ranks"),
          .measured = {operation_of(json.at("operation")), json.at("bytes")},
          .transport = json.at("transport"),
          .seconds = {json.at("seconds").at("rounds").get<std::vector<double>>()},
          .iterations = json.at("iterations").get<std::vector<int64_t>>()};
}

// With what it was measured against.
Json full_json(const Measurement& measurement, const std::vector<Measurement>& all) {
  Json json = measurement_json(measurement);
  if (measurement.measured.bytes > 0) json["bytes_per_second"] = measurement.bandwidth();
  for (const std::string other : {"gloo", "c10d"}) {
    const Measurement* const reference = find(all, measurement.ranks, measurement.measured, other);
    if (reference == nullptr || reference == &measurement) continue;
    json["time_to_" + other] = spread_json(quotient(measurement.seconds, reference->seconds));
  }
  return json;
}

Json finding_json(const Claim& claim, const Finding& finding) {
  Json json = {{"ranks", finding.ranks},
               {"operation", name(finding.measured.operation)},
               {"bytes", finding.measured.bytes},
               {"figure", spread_json(finding.figure)},
               {"holds", finding.holds}};
  for (size_t i = 0; i < claim.others.size(); ++i) {
    json["against"][claim.others[i]] = spread_json(finding.against[i]);
  }
  return json;
}

Json verdict_json(const Verdict& verdict) {
  const Claim& claim = verdict.claim;
  const bool times = claim.figure == Claim::Figure::kTimeRatio;
  const auto holds = verdict.holds();
  Json json = {{"claim", claim.words()},
               {"figure", times ? "time ratio" : "bandwidth ratio"},
               {times ? "at_most" : "at_least", claim.bound},
               {"holds", holds ? Json(*holds) : Json(nullptr)},
               {"findings", Json::array()}};
  for (const Finding& finding : verdict.findings) {
    json["findings"].push_back(finding_json(claim, finding));
  }
  return json;
}

}  // namespace

Json to_json(const Run& run) {
  Json json = {{"ranks", run.ranks}, {"absent", Json::array()}, {"measurements", Json::array()}};
  for (const Absent& absent : run.absent) {
    json["absent"].push_back({{"transport", absent.transport}, {"reason", absent.reason}});
  }
  for (const Measurement& measurement : run.measurements) {
    json["measurements"].push_back(measurement_json(measurement));
  }
  return json;
}

Run run_from_json(const Json& json) {
  Run run{.ranks = json.at("ranks")};
  for (const Json& absent : json.at("absent")) {
    run.absent.push_back({absent.at("transport"), absent.at("reason")});
  }
  for (const Json& measurement : json.at("measurements")) {
    run.measurements.push_back(measurement_from_json(measurement));
  }
  return run;
}

Json document(const Machine& machine, const Flags& flags, const std::vector<Run>& runs,
              const std::vector<Verdict>& verdicts) {
  Json json = {{"machine",
                {{"host", machine.host},
                 {"cpu", machine.cpu},
                 {"cores", machine.cores},
                 {"load_at_start", machine.load},
                 {"libtorch", machine.libtorch}}},
               {"rounds", flags.rounds},
               {"threads_per_rank", 1},
               {"runs", Json::array()},
               {"verdicts", Json::array()}};
  for (const Run& run : runs) {
    Json measured = to_json(run);
    measured["measurements"].clear();
    for (const Measurement& measurement : run.measurements) {
      measured["measurements"].push_back(full_json(measurement, run.measurements));
    }
    json["runs"].push_back(std::move(measured));
  }
  for (const Verdict& verdict : verdicts) json["verdicts"].push_back(verdict_json(verdict));
  return json;
}

}  // namespace collectives
