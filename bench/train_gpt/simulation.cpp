#include "bench/train_gpt/simulation.h"

#include <cstdio>
#include <iomanip>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "bench/train_gpt/expert_layers.h"
#include "bench/train_gpt/fitting.h"
#include "bench/train_gpt/kept_activations.h"
#include "bench/train_gpt/memory_formula.h"
#include "bench/train_gpt/run_report.h"
#include "bench/train_gpt/trained_gpt.h"
#include "parallel/context/blocks.h"
#include "pipeline/schedule/simulation.h"
#include "planning/allocation_record.h"
#include "planning/simulated_workspaces.h"
#include "zero/setup/sharded_model.h"
#include "zero/update/sharded_updates.h"
#include "zeropage/bytes.h"
#include "zeropage/simulation.h"

namespace train_gpt {
namespace {

using zeropage::AllocatorSegments;
using zeropage::comm::kOperationCount;
using zeropage::comm::Operation;
using zeropage::comm::SimulatedCommunicator;
using zeropage::comm::SimulatedCost;
using zeropage::comm::SimulationFigures;
using zeropage::comm::SimulationOptions;
using zeropage::comm::Traffic;
using zeropage::memory::Tier;
using zeropage::planning::AllocationChange;
using zeropage::planning::AllocationRecord;
using zeropage::planning::Reserving;

// Ranks differ in what they broadcast and, with ragged slices, reduce; beyond this many, the ends
// show it.
constexpr int kMostRanksInFull = 16;

struct SimulatedRank {
  int rank = 0;
  int64_t parameters = 0;
  int64_t persistent_bytes = 0;
  zeropage::memory::Breakdown at_peak;  // over all steps
  zeropage::memory::TierBytes away;     // after the last one, on the host and on NVMe
  SimulationFigures wrapping;           // wrapping the model
  SimulationFigures all_steps;          // and all steps
  SentByAxis wire;
  std::vector<zeropage::PlacedExperts> experts;
  bool cuts_experts = false;
  // With --device cuda: the most that LibTorch's allocator would have from the device.
  int64_t reserved_bytes = 0;        // with segments that grow
  int64_t reserved_fixed_bytes = 0;  // with fixed ones
};

zeropage::comm::Link link_of(const std::pair<double, double>& flag) {
  return {.latency_seconds = flag.first * 1e-6, .bytes_per_second = flag.second * 1e9};
}

void add(SimulatedCost& sum, const SimulatedCost& cost) {
  sum.calls += cost.calls;
  sum.sent += cost.sent;
  sum.seconds += cost.seconds;
}

SimulationFigures figures_of(const zeropage::DistributedDataParallelBase& model,
                             const Places& places) {
  SimulationFigures sum;
  auto worlds = worlds_of(model);
  for (const char* axis : {"expert", "context", "tensor", "pipeline"}) {
    if (const zeropage::World* const world = places.along(axis)) worlds.emplace_back(axis, *world);
  }
  for (const auto& [name, world] : worlds) {
    const SimulationFigures& of_world = SimulatedCommunicator::of(world.communicator()).figures();
    for (size_t index = 0; index < kOperationCount; ++index) {
      const auto operation = static_cast<Operation>(index);
      add(sum.by_operation[index], of_world[operation]);
    }
  }
  return sum;
}

zeropage::comm::World simulated_world(const Flags& flags, int rank) {
  return zeropage::comm::World::simulated(
      {.rank = rank,
       .topology = zeropage::comm::Topology::even(flags.ranks, flags.simulation.ranks_per_host),
       .within_host = link_of(flags.simulation.within_host),
       .between_hosts = link_of(flags.simulation.between_hosts)});
}

// What a rank allocated, in order.
struct Allocations {
  bool is_deferred = true;
  std::vector<AllocationChange> wrapping = {};
  std::vector<AllocationChange> after = {};

  int64_t reserved_in(AllocatorSegments segments) const {
    Reserving reserving({.expandable_segments = segments == AllocatorSegments::kExpandable});
    reserving.apply(wrapping);
    // Wrapping gives this memory back where the module was on the device, so the simulation does.
    if (!is_deferred) reserving.release_cached();
    reserving.apply(after);
    return reserving.so_far().peak_bytes;
  }
};

SimulatedRank run_rank(const Flags& flags, int rank) {
  const auto ledger =
      std::make_shared<zeropage::memory::Ledger>(c10::str("rank ", rank, "/", flags.ranks));
  const zeropage::memory::LedgerScope scope(ledger);
  const auto allocations = std::make_shared<AllocationRecord>(
      flags.constructs_deferred() ? AllocationRecord::Construction::kHasNoMemory
                                  : AllocationRecord::Construction::kIsOnTheDevice);
  if (flags.simulates_cuda()) ledger->sink().exchange(allocations);
  zeropage::planning::SimulatedWorkspaces workspaces(flags.simulates_cuda()
                                                         ? allocator_of_simulated_cuda().workspaces
                                                         : zeropage::memory::ProductWorkspaces());
  const zeropage::parallel::context::SimulatedDeviceScope blocks(flags.simulates_cuda());
  const auto world = simulated_world(flags, rank);
  SimulatedRank run{.rank = rank};
  const Places places = Places::of(world, flags);
  TrainedGpt trained(places, flags);
  zeropage::DistributedDataParallelBase& model = trained.model();
  Allocations allocated{.is_deferred = flags.constructs_deferred(),
                        .wrapping = allocations->take()};
  const auto optimizer = trained.make_optimizer();
  for (const auto& parameter : model.parameters()) run.parameters += parameter.numel();
  run.persistent_bytes = sharded_parameters_of(model)
                             .pages->plan()
                             .held(updates_of(*optimizer).states_of_a_parameter())[Tier::kDevice]
                             .total();
  run.wrapping = figures_of(model, places);
  const std::vector<Batch> batches(static_cast<size_t>(flags.accumulator.micro_steps),
                                   batch_without_values(flags));
  KeptActivations kept(flags.checkpointing, places.all, model);
  trained.begin([&](const std::function<torch::Tensor()>& forward) {
    workspaces.before_forward();
    torch::Tensor output;
    {
      const KeptActivations::Forward policy(kept);
      output = forward();
    }
    // What follows a forward is a backward, or another forward.
    workspaces.before_backward();
    return output;
  });
  ledger->reset_peak();
  for (int64_t step = 0; step < flags.steps; ++step) {
    trained.backward(batches, [](int64_t) { return nullptr; });
    trained.accumulator().step(*optimizer);
    if (places.along("pipeline") != nullptr) trained.loss();
    // A real run reports its loss; there is none here.
    mean_over_ranks(places.samples, 0.0);
  }
  run.at_peak = ledger->at_peak(torch::kMeta);
  allocated.after = allocations->take();
  run.reserved_bytes = allocated.reserved_in(AllocatorSegments::kExpandable);
  run.reserved_fixed_bytes = allocated.reserved_in(AllocatorSegments::kFixed);
  for (const Tier tier : {Tier::kHost, Tier::kNvme}) run.away[tier] = ledger->offloaded(tier);
  run.all_steps = figures_of(model, places);
  run.wire = sent_by_axis(trained, places);
  run.experts = trained.experts();
  run.cuts_experts = trained.cuts_experts();
  return run;
}

std::vector<SimulatedRank> run_ranks(const Flags& flags) {
  std::vector<SimulatedRank> ranks;
  for (int rank = 0; rank < flags.ranks; ++rank) {
    const bool at_an_end = rank == 0 || rank == flags.ranks - 1;
    if (flags.ranks <= kMostRanksInFull || at_an_end) ranks.push_back(run_rank(flags, rank));
  }
  return ranks;
}

// The part of the ranks' time in which they wait, where the gradients of inputs and of weights take as long as a forward
// each, and messages no time.
double bubble_of(const Flags& flags) {
  const auto schedule =
      zeropage::parallel::make_schedule(flags.schedule_kind(), flags.chunks_of_rank());
  const auto lists =
      schedule->actions(flags.pipeline, static_cast<int>(flags.accumulator.micro_steps));
  return zeropage::pipeline::simulate(lists,
                                      {{.forward = 1, .input_gradient = 1, .weight_gradient = 1}})
      .bubble;
}

std::string pipeline_text(const Flags& flags) {
  if (flags.pipeline == 1) return "";
  std::ostringstream out;
  out << "in a pipeline of " << flags.pipeline << " by " << flags.schedule << " (bubble "
      << std::fixed << std::setprecision(1) << 100 * bubble_of(flags) << " %), ";
  return out.str();
}

std::string row(const std::string& label, const SimulatedCost& cost, double per) {
  const auto share = [per](int64_t figure) { return static_cast<double>(figure) / per; };
  const auto bytes = [&](int64_t figure) {
    return zeropage::memory::format_bytes(static_cast<int64_t>(share(figure)));
  };
  std::ostringstream out;
  out << std::left << std::setw(16) << label << std::right << std::fixed << std::setprecision(1)
      << std::setw(8) << share(cost.calls) << std::setw(12) << bytes(cost.sent.within_host.bytes)
      << std::setw(12) << bytes(cost.sent.between_hosts.bytes) << std::setw(12)
      << share(cost.sent.total().messages) << std::setw(14) << std::setprecision(3)
      << cost.seconds * 1000 / per << " ms\n";
  return out.str();
}

// What the steps cost by operation, a step; wrapping apart, once.
std::string table(const Flags& flags, const SimulatedRank& run) {
  std::ostringstream out;
  out << "rank " << std::left << std::setw(11) << run.rank
      << "   calls within host     between    messages     modelled\n";
  SimulatedCost wrapping, steps;
  for (size_t index = 0; index < kOperationCount; ++index) {
    const auto operation = static_cast<Operation>(index);
    SimulatedCost cost = run.all_steps[operation];
    const SimulatedCost& before = run.wrapping[operation];
    cost.calls -= before.calls;
    cost.sent -= before.sent;
    cost.seconds -= before.seconds;
    add(wrapping, before);
    add(steps, cost);
    if (cost.calls > 0) {
      out << row(name(operation), cost, static_cast<double>(flags.steps));
    }
  }
  out << row("a step", steps, static_cast<double>(flags.steps))
      << row("wrapping, once", wrapping, 1);
  return out.str();
}

nlohmann::json to_json(const Traffic& traffic) {
  return {{"bytes", traffic.bytes}, {"messages", traffic.messages}};
}

// Wrapping and all steps.
nlohmann::json to_json(const SimulatedRank& run) {
  nlohmann::json json = {{"rank", run.rank}};
  for (size_t index = 0; index < kOperationCount; ++index) {
    const auto operation = static_cast<Operation>(index);
    const SimulatedCost& cost = run.all_steps[operation];
    json[name(operation)] = {{"calls", cost.calls},
                             {"within_host", to_json(cost.sent.within_host)},
                             {"between_hosts", to_json(cost.sent.between_hosts)},
                             {"seconds", cost.seconds}};
  }
  return json;
}

std::string reserved_text(const SimulatedRank& run) {
  if (run.reserved_bytes == 0) return "";
  using zeropage::memory::format_bytes;
  return c10::str(", for which LibTorch's allocator reserves ", format_bytes(run.reserved_bytes),
                  ", or ", format_bytes(run.reserved_fixed_bytes),
                  " with expandable_segments:False");
}

}  // namespace

void simulate(const Flags& given) {
  Flags flags = given;
  flags.options.page_bytes = zeropage::page_bytes_on({flags.device_type(), 0}, flags.options);
  if (flags.threads > 0) torch::set_num_threads(flags.threads);
  flags.fit.description = fit_to_limits(simulated_world(flags, /*rank=*/0), flags);
  if (!flags.fit.description.empty()) std::cout << "fits: " << flags.fit.description << std::endl;
  const std::vector<SimulatedRank> ranks = run_ranks(flags);
  flags.experts_are_cut = ranks.front().cuts_experts;
  const int64_t parameters = parameters_of(flags);
  const auto formula_bytes = [&](const SimulatedRank& run) {
    return memory_formula(flags, run.parameters,
                          flags.ranks / flags.ranks_of_model())[Tier::kDevice]
        .persistent();
  };
  std::cout << parameters << " parameters on " << flags.ranks << " simulated ranks, "
            << (flags.tensor > 1 ? c10::str(flags.tensor, " of them to a sample, ") : "")
            << pipeline_text(flags) << std::min(flags.ranks, flags.simulation.ranks_per_host)
            << " a host, stage " << text_of(flags.options.stage) << ", " << flags.steps
            << " step(s)\npersistent bytes a rank: "
            << zeropage::memory::format_bytes(ranks.front().persistent_bytes) << " (formula "
            << zeropage::memory::format_bytes(formula_bytes(ranks.front())) << "), at the peak "
            << zeropage::memory::format_bytes(ranks.front().at_peak.total())
            << reserved_text(ranks.front()) << '\n'
            << experts_text(ranks.front().experts, flags) << "\nsent a step by "
            << table(flags, ranks.front());
  if (ranks.size() > 1) std::cout << "\nsent a step by " << table(flags, ranks.back());
  if (flags.json_path.empty()) return;
  nlohmann::json simulated = nlohmann::json::array();
  nlohmann::json json = {{"flags", flags.to_json()}, {"parameters", parameters}};
  if (flags.experts.any()) {
    json["experts"] = experts_json({.placed = ranks.front().experts, .load = {}}, flags);
  }
  if (flags.pipeline > 1) json["bubble"] = bubble_of(flags);
  for (const SimulatedRank& run : ranks) {
    const zeropage::comm::WireTraffic sent = run.wire.total();
    json["wire_bytes"].push_back(wire_json(run.rank, sent, &Traffic::bytes));
    json["wire_messages"].push_back(wire_json(run.rank, sent, &Traffic::messages));
    json["wire_bytes_by_axis"].push_back(axes_json(run.rank, run.wire));
    json["memory"].push_back({{"rank", run.rank},
                              {"persistent_bytes", run.persistent_bytes},
                              {"formula_bytes", formula_bytes(run)},
                              {"peak_bytes", run.at_peak.total()},
                              {"at_peak", kinds_json(run.at_peak)}});
    if (run.reserved_bytes > 0) {
      json["memory"].back()["reserved_bytes"] = run.reserved_bytes;
      json["memory"].back()["reserved_fixed_bytes"] = run.reserved_fixed_bytes;
    }
    if (flags.forms.offloads()) {
      json["memory"].back()["offloaded"] = {{"host_bytes", run.away[Tier::kHost].total()},
                                            {"host", kinds_json(run.away[Tier::kHost])},
                                            {"nvme_bytes", run.away[Tier::kNvme].total()},
                                            {"nvme", kinds_json(run.away[Tier::kNvme])}};
    }
    simulated.push_back(to_json(run));
  }
  json["simulated"] = simulated;
  write_json_file(flags, json);
}

}  // namespace train_gpt
