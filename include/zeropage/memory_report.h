// The ledgers of all ranks: what each holds, by kind, and what it held at most.
//
//   const auto report = zeropage::memory_report(world);  // on all ranks
//   if (world.rank() == 0) std::cout << report;
//
// Costs a round of texts of some hundred bytes a rank, through the store: for a line of the log, not for
// every step.
// Collective. Threads: the training thread, whose ledger is this rank's.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include <c10/core/DeviceType.h>

#include "zeropage/ledger.h"
#include "zeropage/world.h"

namespace zeropage {

// In bytes.
struct RankMemory {
  // On the world's device: now, and at the moment when its total was highest since the start or
  // Ledger::reset_peak(). held.persistent() lives from step to step, its gradients until they are zeroed;
  // held.total() is all.
  memory::Breakdown held = {};
  memory::Breakdown at_peak = {};
  // On the host where the world's device is an accelerator; else nothing, as `held` is the host's.
  memory::Breakdown on_host = {};
  // Offloaded from the device: on the host, in a file.
  memory::Breakdown in_host_tier = {};
  memory::Breakdown in_nvme_tier = {};
  // The process's resident set now and at its highest: also code, LibTorch itself, and what no ledger
  // knows. The same figure for ranks that are threads of one process.
  int64_t resident_bytes = 0;
  int64_t peak_resident_bytes = 0;

  friend bool operator==(const RankMemory& left, const RankMemory& right);
};

struct MemoryReport {
  c10::DeviceType device = c10::kCPU;  // of `held` and `at_peak`
  std::vector<RankMemory> ranks = {};  // by rank

  // A table with a row for each kind and a column for each rank, in MiB and the like. Of more than 6 ranks it shows
  // the 6 whose total was highest, and a line about the others.
  std::string to_string() const;
};

std::ostream& operator<<(std::ostream& out, const MemoryReport& report);

// All ranks get the figures of all ranks.
MemoryReport memory_report(const comm::World& world);

}  // namespace zeropage
