#include "bench/train_gpt/run_report.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "bench/train_gpt/memory_formula.h"
#include "examples/output_files/output_files.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace train_gpt {
namespace {

using zeropage::checkpointing::RecomputeStatistics;
using zeropage::comm::Traffic;
using zeropage::memory::Breakdown;
using zeropage::memory::Kind;
using zeropage::memory::kKindCount;
using zeropage::memory::PagingStatistics;
using zeropage::memory::Tier;
using zeropage::memory::TierBytes;

// Columns that still fit an 80-column terminal beside the labels and the formula.
constexpr size_t kTableRanks = 3;

// RankFigures as one row of integers, for the wire.
constexpr int64_t kRowLength =
    4 * static_cast<int64_t>(kKindCount) + 6 + 2 * static_cast<int64_t>(kOperations * kAxes.size());

std::vector<int64_t> to_row(const RankFigures& figures) {
  std::vector<int64_t> row;
  for (const Breakdown* bytes : {&figures.memory.now, &figures.memory.at_peak,
                                 &figures.memory.on_host, &figures.memory.on_nvme}) {
    row.insert(row.end(), bytes->bytes.begin(), bytes->bytes.end());
  }
  row.insert(row.end(), {figures.memory.activation_peak_bytes, figures.memory.rss_base_bytes,
                         figures.memory.rss_peak_bytes, figures.memory.reserved_bytes,
                         figures.memory.host_bytes, figures.parameters});
  for (zeropage::comm::WireTraffic of_axis : figures.wire.axes) {
    for (const Traffic* sent : operations(of_axis)) {
      row.insert(row.end(), {sent->bytes, sent->messages});
    }
  }
  return row;
}

RankFigures from_row(const int64_t* row) {
  RankFigures figures;
  for (Breakdown* bytes : {&figures.memory.now, &figures.memory.at_peak, &figures.memory.on_host,
                           &figures.memory.on_nvme}) {
    std::copy_n(row, kKindCount, bytes->bytes.begin());
    row += kKindCount;
  }
  figures.memory.activation_peak_bytes = row[0];
  figures.memory.rss_base_bytes = row[1];
  figures.memory.rss_peak_bytes = row[2];
  figures.memory.reserved_bytes = row[3];
  figures.memory.host_bytes = row[4];
  figures.parameters = row[5];
  row += 6;
  for (zeropage::comm::WireTraffic& of_axis : figures.wire.axes) {
    for (Traffic* sent : operations(of_axis)) {
      *sent = {row[0], row[1]};
      row += 2;
    }
  }
  return figures;
}

}  // namespace

std::vector<RankFigures> gather_figures(const zeropage::comm::World& world,
                                        const RankFigures& own) {
  const auto rows = torch::zeros({world.size(), kRowLength}, torch::kInt64);
  const std::vector<int64_t> row = to_row(own);
  std::copy(row.begin(), row.end(), rows[world.rank()].mutable_data_ptr<int64_t>());
  world.communicator().all_gather(rows.view({-1}), "the run's figures").wait();
  std::vector<RankFigures> all;
  for (int rank = 0; rank < world.size(); ++rank) {
    all.push_back(from_row(rows[rank].const_data_ptr<int64_t>()));
  }
  return all;
}

namespace {

// A row of what sharded parameters cost in a step.
std::string paging_row(const std::string& label, const PagingStatistics& sum, int64_t steps) {
  const auto count = [steps](int64_t value) {
    std::ostringstream text;
    text << std::fixed << std::setprecision(1)
         << static_cast<double>(value) / static_cast<double>(steps);
    return text.str();
  };
  std::ostringstream row;
  row << std::left << std::setw(24) << label << std::right << std::setw(8) << count(sum.faults)
      << std::setw(12) << count(sum.prefetched) << std::setw(11) << count(sum.evictions)
      << std::setw(13) << zeropage::memory::format_bytes(sum.bytes_gathered / steps) << std::setw(9)
      << std::fixed << std::setprecision(1) << sum.wait_seconds * 1000 / static_cast<double>(steps)
      << " ms\n";
  return row.str();
}

// The first step records, later ones follow.
std::string paging_table(const std::vector<PagingStatistics>& by_step) {
  std::ostringstream out;
  out << "\npaging a step, rank 0     faults  prefetched  evictions     gathered      waited\n"
      << paging_row("step 1 (recorded)", by_step.front(), 1);
  PagingStatistics rest;
  for (size_t step = 1; step < by_step.size(); ++step) rest += by_step[step];
  const auto steps = static_cast<int64_t>(by_step.size()) - 1;
  if (steps > 0) out << paging_row("later steps, mean", rest, steps);
  return out.str();
}

// The highest peak of activations on any rank.
int64_t activation_peak(const std::vector<RankFigures>& ranks) {
  int64_t peak = 0;
  for (const RankFigures& rank : ranks) peak = std::max(peak, rank.memory.activation_peak_bytes);
  return peak;
}

std::string activations_line(const RecomputeStatistics& recompute, int64_t peak_bytes) {
  const double share = recompute.forward_flops > 0
                           ? 100 * recompute.recomputed_flops / recompute.forward_flops
                           : 0.0;
  std::ostringstream line;
  line << "activations at their peak " << zeropage::memory::format_bytes(peak_bytes)
       << ", recomputed " << std::fixed << std::setprecision(1) << share
       << " % of their regions' FLOPs in " << recompute.recompute_seconds << " s\n";
  return line.str();
}

std::string load_line(const ExpertLoad& load) {
  std::ostringstream line;
  line << "busiest expert          " << std::fixed << std::setprecision(2) << load.worst_expert()
       << " of an even share of tokens, busiest rank " << load.worst_rank()
       << " (the worst block, over all steps)\n";
  return line.str();
}

nlohmann::json activations_json(const CheckpointFlags& flags, const RunFigures& run,
                                const std::vector<RankFigures>& ranks) {
  const RecomputeStatistics& recompute = run.recompute;
  nlohmann::json by_rank = nlohmann::json::array();
  for (const RankFigures& rank : ranks) by_rank.push_back(rank.memory.activation_peak_bytes);
  return {{"policy", flags.text},
          {"peak_bytes", activation_peak(ranks)},
          {"peak_bytes_by_rank", by_rank},
          {"predicted_peak_bytes", run.forecast_activation_peak_bytes
                                       ? nlohmann::json(*run.forecast_activation_peak_bytes)
                                       : nlohmann::json()},
          {"offloaded_bytes", run.offloaded_peak_bytes},
          {"forwards", recompute.forwards},
          {"replays", recompute.replays},
          {"forward_flops", recompute.forward_flops},
          {"recomputed_flops", recompute.recomputed_flops},
          {"recompute_seconds", recompute.recompute_seconds}};
}

// What left rank 0's device.
std::string offload_lines(const Flags& flags, const RankMemory& memory, const TierBytes& expected,
                          const RunFigures& run) {
  using zeropage::memory::format_bytes;
  std::ostringstream out;
  out << "offloaded               host " << format_bytes(memory.on_host.total()) << " (formula "
      << format_bytes(expected[Tier::kHost].total()) << "), nvme "
      << format_bytes(memory.on_nvme.total()) << " (formula "
      << format_bytes(expected[Tier::kNvme].total()) << ")\n";
  if (flags.options.offload.step == zeropage::StepWhen::kOneStepLate) {
    out << "--offload-step late: every update came one step late; another run than without\n";
  }
  return out.str() + run.offload_description;
}

nlohmann::json to_json(const PagingStatistics& statistics) {
  return {{"faults", statistics.faults},
          {"prefetched", statistics.prefetched},
          {"evictions", statistics.evictions},
          {"bytes_gathered", statistics.bytes_gathered},
          {"wait_seconds", statistics.wait_seconds}};
}

nlohmann::json restarts_json(const std::vector<zeropage::Restart>& restarts) {
  nlohmann::json list = nlohmann::json::array();
  for (const zeropage::Restart& of : restarts) {
    list.push_back(
        {{"rank", of.rank}, {"why", of.why}, {"step", of.step}, {"seconds", of.seconds}});
  }
  return list;
}

nlohmann::json probe_json(const zeropage::ProbeReport& probe) {
  nlohmann::json figures = nlohmann::json::array(), slow = nlohmann::json::array();
  for (const zeropage::ProbeFigure& of : probe.figures) {
    figures.push_back(
        {{"what", of.what}, {"unit", of.unit}, {"median", of.median}, {"by_rank", of.by_rank}});
  }
  for (const zeropage::SlowRank& of : probe.slow) {
    slow.push_back(
        {{"rank", of.rank}, {"what", of.what}, {"figure", of.figure}, {"median", of.median}});
  }
  return {{"seconds", probe.seconds}, {"figures", figures}, {"slow", slow}};
}

}  // namespace

nlohmann::json kinds_json(const Breakdown& bytes) {
  nlohmann::json json;
  for (size_t kind = 0; kind < kKindCount; ++kind) {
    json[std::string(zeropage::memory::name(static_cast<Kind>(kind)))] = bytes.bytes[kind];
  }
  return json;
}

void check_outputs(const Flags& flags) {
  examples::check_outputs({{"--json", flags.json_path},
                           {"--report", flags.profile.report},
                           {"--trace", flags.profile.trace},
                           {"--timeline", flags.timeline_path},
                           {"--memory-snapshot", flags.memory_snapshot_path}});
}

void write_json_file(const Flags& flags, const nlohmann::json& json) {
  examples::write_output({"--json", flags.json_path}, json.dump(1) + '\n');
}

std::string table(const Flags& flags, const RunFigures& run,
                  const std::vector<RankFigures>& ranks) {
  using zeropage::memory::format_bytes;
  std::vector<zeropage::memory::MemoryColumn> columns;
  for (size_t rank = 0; rank < std::min(ranks.size(), kTableRanks); ++rank) {
    const RankMemory& memory = ranks[rank].memory;
    columns.push_back({"rank " + std::to_string(rank), memory.at_peak, memory.now.persistent()});
  }
  const int data_ranks = static_cast<int>(ranks.size()) / flags.ranks_of_model();
  const int64_t parameters = ranks.front().parameters;
  const TierBytes expected = memory_formula(flags, parameters, data_ranks);
  // Its rows are of the peak, when gradients may be there.
  zeropage::memory::MemoryColumn formula{"formula", expected[Tier::kDevice],
                                         expected[Tier::kDevice].persistent()};
  formula.breakdown[Kind::kGradient] += gradient_formula(flags, parameters, data_ranks);
  std::ostringstream out;
  out << "memory at the peak, by kind (" << run.parameters << " parameters, stage "
      << text_of(flags.options.stage) << ", " << ranks.size()
      << (ranks.size() == 1 ? " rank" : " ranks") << ")\n"
      << zeropage::memory::memory_table(columns, formula);
  out << "resident over base      ";
  for (size_t rank = 0; rank < columns.size(); ++rank) {
    const RankMemory& memory = ranks[rank].memory;
    const std::string cell = format_bytes(memory.rss_peak_bytes - memory.rss_base_bytes);
    out << std::string(12 - std::min<size_t>(cell.size(), 12), ' ') << cell;
  }
  if (ranks.size() > kTableRanks)
    out << "\n(" << ranks.size() - kTableRanks << " more ranks in --json)";
  out << '\n';
  if (flags.experts.any()) out << load_line(run.experts.load);
  if (flags.forms.offloads()) out << offload_lines(flags, ranks.front().memory, expected, run);
  if (!flags.checkpointing.keeps_all()) {
    out << activations_line(run.recompute, activation_peak(ranks)) << run.kept_activations;
  }
  if (zeropage::zero::shards_parameters(flags.options)) out << paging_table(run.paging);
  return out.str();
}

void write_json(const Flags& flags, const RunFigures& run, const std::vector<RankFigures>& ranks) {
  nlohmann::json memory = nlohmann::json::array();
  nlohmann::json bytes_sent = nlohmann::json::array();
  nlohmann::json messages_sent = nlohmann::json::array();
  nlohmann::json by_axis = nlohmann::json::array();
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const TierBytes formula = memory_formula(
        flags, ranks[rank].parameters, static_cast<int>(ranks.size()) / flags.ranks_of_model());
    const RankMemory& figures = ranks[rank].memory;
    memory.push_back({{"rank", rank},
                      {"persistent_bytes", figures.now.persistent()},
                      {"formula_bytes", formula[Tier::kDevice].persistent()},
                      {"peak_bytes", figures.at_peak.total()},
                      {"at_peak", kinds_json(figures.at_peak)},
                      {"rss_base_bytes", figures.rss_base_bytes},
                      {"rss_peak_bytes", figures.rss_peak_bytes}});
    if (figures.reserved_bytes > 0) {
      memory.back()["reserved_bytes"] = figures.reserved_bytes;
      memory.back()["host_bytes"] = figures.host_bytes;
    }
    if (flags.forms.offloads()) {
      memory.back()["offloaded"] = {{"host_bytes", figures.on_host.total()},
                                    {"host_formula_bytes", formula[Tier::kHost].total()},
                                    {"host", kinds_json(figures.on_host)},
                                    {"nvme_bytes", figures.on_nvme.total()},
                                    {"nvme_formula_bytes", formula[Tier::kNvme].total()},
                                    {"nvme", kinds_json(figures.on_nvme)}};
    }
    const auto number = static_cast<int>(rank);
    const zeropage::comm::WireTraffic sent = ranks[rank].wire.total();
    bytes_sent.push_back(wire_json(number, sent, &Traffic::bytes));
    messages_sent.push_back(wire_json(number, sent, &Traffic::messages));
    by_axis.push_back(axes_json(number, ranks[rank].wire));
  }
  nlohmann::json json = {
      {"flags", flags.to_json()},
      {"fits", flags.fit.description},
      {"parameters", run.parameters},
      {"first_step", run.first_step},
      {"loss", run.loss},
      {"saves", run.saves},
      {"gradient_norm", run.gradient_norm},
      {"clipped_norm", run.clipped_norm},
      {"loss_scale", run.loss_scale},
      {"skipped_steps", run.skipped_steps},
      {"step_seconds", run.step_seconds},
      {"update_seconds", run.update_seconds},
      {"tokens_per_second", run.tokens_per_second},
      {"held_out_windows", run.held_out_windows},
      {"held_out_loss", run.held_out_loss},
      {"memory", memory},
      {"activations", activations_json(flags.checkpointing, run, ranks)},
      {"wire_bytes", bytes_sent},
      {"wire_messages", messages_sent},
      {"wire_bytes_by_axis", by_axis},
      {"communicator", run.communicator},
      {"weights_sha256",
       run.weights_sha256.empty() ? nlohmann::json() : nlohmann::json(run.weights_sha256)}};
  if (flags.experts.any()) json["experts"] = experts_json(run.experts, flags);
  if (flags.buddy_every > 0) json["restarts"] = restarts_json(run.restarts);
  if (flags.memory_rungs > 0) json["memory_rung"] = run.memory_rung;
  if (run.probe) json["probe"] = probe_json(*run.probe);
  if (run.utilisation) json["mfu"] = *run.utilisation;
  if (run.disk) {
    json["disk"] = {{"read_bytes_per_second", run.disk->read_bytes_per_second},
                    {"write_bytes_per_second", run.disk->write_bytes_per_second},
                    {"step_seconds", run.disk_forecast.step_seconds}};
  }
  if (zeropage::zero::shards_parameters(flags.options)) {
    PagingStatistics sum;
    nlohmann::json by_step = nlohmann::json::array();
    for (const PagingStatistics& of_step : run.paging) {
      sum += of_step;
      by_step.push_back(to_json(of_step));
    }
    json["paging"] = to_json(sum);
    json["paging_by_step"] = by_step;
  }
  write_json_file(flags, json);
}

}  // namespace train_gpt
