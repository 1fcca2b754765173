#include "tools/topology_command.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <thread>

#include <nlohmann/json.hpp>

#include "device/device_places.h"
#include "device/host_mapping.h"
#include "device/host_memory.h"
#include "device/page_nodes.h"
#include "device/topology.h"
#include "tools/state_words.h"
#include "zeropage/bytes.h"

namespace zeropage::tools {
namespace {

using nlohmann::json;
using namespace memory;

constexpr int kMostRanks = 4096;
constexpr int kCopies = 5;

int launchers_ranks() {
  const char* const text = std::getenv("LOCAL_WORLD_SIZE");
  const int ranks = text == nullptr ? 1 : std::atoi(text);
  if (ranks < 1 || ranks > kMostRanks) {
    throw std::invalid_argument("LOCAL_WORLD_SIZE: expected 1 to 4096, got \"" + std::string(text) +
                                "\"; correct or unset it");
  }
  return ranks;
}

// Copies the mapping's first half to its second by a thread on each core, each its part; the
// fastest of several, in bytes read and written a second.
double copy_bytes_per_second(const device::HostMapping& mapping, const device::CoreSet& cores) {
  const size_t half = static_cast<size_t>(mapping.bytes()) / 2;
  double best = 0;
  for (int copy = 0; copy < kCopies; ++copy) {
    const auto begin = std::chrono::steady_clock::now();
    {
      std::vector<std::jthread> threads;
      for (size_t part = 0; part < cores.size(); ++part) {
        threads.emplace_back([&, part] {
          device::bind_this_thread({cores[part]});
          const size_t first = half * part / cores.size();
          const size_t last = half * (part + 1) / cores.size();
          std::memcpy(mapping.data() + half + first, mapping.data() + first, last - first);
        });
      }
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    best = std::max(best, 2.0 * static_cast<double>(half) / took.count());
  }
  return best;
}

// Where memory lies that the rank's cores touched first.
json placement_of(const device::CoreSet& cores, int64_t bytes) {
  const device::HostMapping mapping(bytes, {.cores = cores});
  json found{{"bytes", mapping.bytes()}};
  try {
    const device::BytesByNode nodes = device::bytes_by_node(mapping.data(), mapping.bytes());
    found["verdict"] = device::describe(nodes);
    for (const auto& [node, bytes_there] : nodes) {
      found["bytes_by_node"][std::to_string(node)] = bytes_there;
    }
    bool as_asked = true;
    for (const auto& [node, bytes_there] : nodes) {
      const bool ours = std::any_of(cores.begin(), cores.end(),
                                    [&](const device::Core& core) { return core.node == node; });
      as_asked = as_asked && ours;
    }
    found["on_the_cores_nodes"] = as_asked;
  } catch (const std::system_error& error) {
    found["verdict"] = error.what();
  }
  found["copy_bytes_per_second"] = copy_bytes_per_second(mapping, cores);
  return found;
}

json memory_of_host() {
  const device::HostMemory memory = device::read_host_memory();
  json found{{"total_bytes", memory.total_bytes},
             {"available_bytes", memory.available_bytes},
             {"usable_bytes", memory.usable_bytes()},
             {"words", describe(memory)}};
  if (memory.cgroup) {
    found["cgroup_limit_bytes"] = memory.cgroup->limit_bytes;
    found["cgroup_used_bytes"] = memory.cgroup->used_bytes;
  }
  if (memory.lockable_bytes) found["lockable_bytes"] = *memory.lockable_bytes;
  return found;
}

json topology(int ranks, int64_t buffer_bytes) {
  const device::Machine& machine = device::Machine::here();
  json found{{"packages", machine.packages()}, {"memory", memory_of_host()}};
  for (const device::NumaNode& node : machine.nodes()) {
    found["nodes"].push_back({{"number", node.number},
                              {"bytes", node.bytes},
                              {"cores", machine.cores_of(node.number).size()}});
  }
  for (const device::Core& core : machine.cores()) {
    found["cores"].push_back({{"index", core.index},
                              {"package", core.package},
                              {"node", core.node},
                              {"cpus", core.cpus}});
  }
  found["devices"] = json::array();
  for (const device::DevicePlace& place : device::cuda_device_places()) {
    found["devices"].push_back({{"name", place.name},
                                {"pci_bus_id", place.pci_bus_id},
                                {"node", machine.node_of_pci(place.pci_bus_id)}});
  }
  int rank = 0;
  for (const device::CoreSet& cores :
       machine.core_sets(ranks, device::device_nodes_of_ranks(ranks))) {
    json indices;
    for (const device::Core& core : cores) indices.push_back(core.index);
    found["ranks"].push_back({{"rank", rank++},
                              {"cores", indices},
                              {"cpus", device::cpu_list(cores)},
                              {"node", device::node_of(cores)},
                              {"placement", placement_of(cores, buffer_bytes)}});
  }
  return found;
}

void print(const json& found) {
  std::printf("%d packages, %zu cores of this process, %zu NUMA nodes\n",
              found["packages"].get<int>(), found["cores"].size(), found["nodes"].size());
  for (const json& node : found["nodes"]) {
    std::printf("node %d: %s, %zu cores\n", node["number"].get<int>(),
                format_bytes(node["bytes"].get<int64_t>()).c_str(), node["cores"].get<size_t>());
  }
  const json& memory = found["memory"];
  std::printf("memory: %s usable (%s), %s lockable\n",
              format_bytes(memory["usable_bytes"].get<int64_t>()).c_str(),
              text_of(memory["words"]).c_str(),
              memory.contains("lockable_bytes")
                  ? format_bytes(memory["lockable_bytes"].get<int64_t>()).c_str()
                  : "any amount");
  for (const json& device : found["devices"]) {
    std::printf("device %s at %s: node %d\n", text_of(device["name"]).c_str(),
                text_of(device["pci_bus_id"]).c_str(), device["node"].get<int>());
  }
  for (const json& rank : found["ranks"]) {
    const json& placement = rank["placement"];
    std::printf(
        "rank %d: %zu cores (hardware threads %s), node %d; what they touch: %s; copy %.1f "
        "GB/s\n",
        rank["rank"].get<int>(), rank["cores"].size(), text_of(rank["cpus"]).c_str(),
        rank["node"].get<int>(), text_of(placement["verdict"]).c_str(),
        placement["copy_bytes_per_second"].get<double>() / 1e9);
  }
}

}  // namespace

TopologyCommand::TopologyCommand(CLI::App& zp) {
  parser_ = zp.add_subcommand("topology", "Show cores, memory, devices and where memory lies");
  parser_->footer(
      "Each rank's cores write a buffer first; where its pages then lie, and how fast they copy "
      "it, is shown.\nExit code 1 when pages lie on other nodes than the cores'.\n"
      "Example: zp topology --ranks 4 --json");
  parser_
      ->add_option("-n,--ranks", ranks_, "Ranks that share this machine [LOCAL_WORLD_SIZE, or 1]")
      ->check(CLI::Range(1, kMostRanks))
      ->type_name("N");
  parser_->add_option("--buffer", buffer_mebibytes_, "The buffer of each rank, in MiB [64]")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->type_name("MIB");
  parser_->add_flag("--json", json_, "One JSON object, sizes in bytes");
}

int TopologyCommand::run(const std::vector<std::string>& after_dashes) const {
  if (!after_dashes.empty()) throw std::invalid_argument("topology takes no program");
  const json found = topology(ranks_ > 0 ? ranks_ : launchers_ranks(), buffer_mebibytes_ * 1_MiB);
  if (json_) {
    std::printf("%s\n", found.dump(2).c_str());
  } else {
    print(found);
  }
  for (const json& rank : found["ranks"]) {
    if (!rank["placement"].value("on_the_cores_nodes", true)) return 1;
  }
  return 0;
}

}  // namespace zeropage::tools
