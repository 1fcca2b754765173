// The cores and the NUMA nodes of this machine, and which cores a rank computes on, by hwloc.
//
//   const auto sets = memory::Machine::here().core_sets(local_ranks);
//   const memory::BindingScope bound(sets[local_rank]);   // this thread, until the scope ends
//
// A core is a physical one, with those of its hardware threads that this process may use: the
// affinity mask and the cgroup's set when Machine::here() was first called. Nodes and hardware
// threads have the operating system's numbers, cores hwloc's logical ones, in which neighbours
// share caches and a node.
// Lifetime: values. Threads: any; a BindingScope begins and ends on one thread.
// Free of torch, for `zp`. Throws std::invalid_argument for what a caller can mend and
// std::runtime_error (std::system_error among them) for what the system refuses.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace zeropage::device {

inline constexpr int kUnknownNode = -1;

struct Core {
  int index = 0;          // logical
  int package = 0;        // logical
  int node = 0;           // the nearest memory
  std::vector<int> cpus;  // its hardware threads, at least one

  friend bool operator==(const Core&, const Core&) = default;
};

// In the logical order.
using CoreSet = std::vector<Core>;

struct NumaNode {
  int number = 0;
  int64_t bytes = 0;
};

class Machine {
 public:
  // Read once, in some 5 ms.
  static const Machine& here();
  // One that is not there, such as "node:2 core:4 pu:1" (hwloc(7), synthetic topologies). For
  // tests: nothing can be bound to it.
  explicit Machine(const std::string& synthetic);

  int packages() const;
  const std::vector<NumaNode>& nodes() const { return nodes_; }
  // The cores that this process may use; at least one.
  const CoreSet& cores() const { return cores_; }
  CoreSet cores_of(int node) const;

  // The node nearest a PCI device, "0000:3b:00.0"; kUnknownNode where the machine does not say.
  // Reads the buses in some 50 ms.
  int node_of_pci(const std::string& bus_id) const;

  // The cores of each of the machine's local ranks: disjoint, contiguous, their sizes at most one
  // apart. Where there are fewer cores than ranks, ranks share: one core each, rank modulo cores.
  // device_nodes: by local rank, the node nearest its device; or empty. If each has cores of this
  // process, a node's cores are divided among its ranks alone, and those of other nodes are left
  // to others; else the nodes do not count. Throws unless 1 <= ranks.
  std::vector<CoreSet> core_sets(int ranks, const std::vector<int>& device_nodes = {}) const;

 private:
  friend class BindingScope;
  friend void bind_this_thread(const CoreSet& cores);
  struct Hwloc;
  explicit Machine(std::shared_ptr<const Hwloc> hwloc);

  std::shared_ptr<const Hwloc> hwloc_;
  std::vector<NumaNode> nodes_;
  CoreSet cores_;
};

// The cores of this process: its part where a launcher says how many processes share the machine
// (LOCAL_RANK and LOCAL_WORLD_SIZE, or Open MPI's), else all. Ranks that are threads of one process
// call core_sets themselves.
CoreSet own_core_set();

// The node that most of the cores are nearest to; the lowest of several. Throws on a set of zero
// cores.
int node_of(const CoreSet& cores);

// "0-3,8": the hardware threads of a set.
std::string cpu_list(const CoreSet& cores);

// The calling thread runs on these cores alone from here on, and so do the threads that it starts.
// Takes some 3 us.
void bind_this_thread(const CoreSet& cores);

// While it lives, the calling thread runs on these cores alone; then where it ran before.
class BindingScope {
 public:
  explicit BindingScope(const CoreSet& cores);
  ~BindingScope();
  BindingScope(const BindingScope&) = delete;
  BindingScope& operator=(const BindingScope&) = delete;

 private:
  struct Before;
  std::unique_ptr<Before> before_;
};

}  // namespace zeropage::device
