#include "device/topology.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <map>
#include <optional>
#include <stdexcept>
#include <system_error>

#include <hwloc.h>

namespace zeropage::device {
namespace {

// A set of hardware threads or of nodes.
class Bitmap {
 public:
  Bitmap() : bits_(hwloc_bitmap_alloc()) {}
  ~Bitmap() { hwloc_bitmap_free(bits_); }
  Bitmap(const Bitmap&) = delete;
  Bitmap& operator=(const Bitmap&) = delete;

  hwloc_bitmap_t get() const { return bits_; }

 private:
  const hwloc_bitmap_t bits_;
};

class LoadedTopology {
 public:
  struct Options {
    const char* synthetic = nullptr;  // null: the machine's own
    hwloc_type_filter_e devices = HWLOC_TYPE_FILTER_KEEP_NONE;
  };

  explicit LoadedTopology(const Options& options) {
    if (hwloc_topology_init(&topology_) != 0) {
      throw std::system_error(errno, std::generic_category(), "hwloc does not start");
    }
    hwloc_topology_set_io_types_filter(topology_, options.devices);
    if (options.synthetic != nullptr &&
        hwloc_topology_set_synthetic(topology_, options.synthetic) != 0) {
      hwloc_topology_destroy(topology_);
      throw std::invalid_argument(std::string("machine: expected one as hwloc describes it, such "
                                              "as \"node:2 core:4 pu:1\", got \"") +
                                  options.synthetic + "\"");
    }
    if (hwloc_topology_load(topology_) != 0) {
      const int reason = errno;
      hwloc_topology_destroy(topology_);
      throw std::system_error(reason, std::generic_category(),
                              "hwloc cannot read the machine's topology; mount /sys and /proc");
    }
  }
  ~LoadedTopology() { hwloc_topology_destroy(topology_); }
  LoadedTopology(const LoadedTopology&) = delete;
  LoadedTopology& operator=(const LoadedTopology&) = delete;

  hwloc_topology_t get() const { return topology_; }

 private:
  hwloc_topology_t topology_ = nullptr;
};

int first_node(hwloc_obj_t object) {
  const int first = object->nodeset == nullptr ? -1 : hwloc_bitmap_first(object->nodeset);
  return first < 0 ? kUnknownNode : first;
}

Core core_of(hwloc_topology_t topology, hwloc_obj_t object, hwloc_const_bitmap_t allowed) {
  hwloc_obj_t package = hwloc_get_ancestor_obj_by_type(topology, HWLOC_OBJ_PACKAGE, object);
  Core core{.index = static_cast<int>(object->logical_index),
            .package = package == nullptr ? 0 : static_cast<int>(package->logical_index),
            .node = std::max(first_node(object), 0),
            .cpus = {}};
  for (int cpu = -1; (cpu = hwloc_bitmap_next(object->cpuset, cpu)) >= 0;) {
    if (hwloc_bitmap_isset(allowed, static_cast<unsigned>(cpu)) != 0) core.cpus.push_back(cpu);
  }
  return core;
}

// `count` cores of a set for each of `parts`, in order; modulo where there are fewer cores.
CoreSet part_of(const CoreSet& cores, size_t part, size_t parts) {
  if (cores.size() < parts) return {cores[part % cores.size()]};
  const auto at = [&](size_t index) {
    return cores.begin() + static_cast<std::ptrdiff_t>(cores.size() * index / parts);
  };
  return {at(part), at(part + 1)};
}

void set_cpus(const CoreSet& cores, const Bitmap& cpus) {
  for (const Core& core : cores) {
    for (const int cpu : core.cpus) hwloc_bitmap_set(cpus.get(), static_cast<unsigned>(cpu));
  }
}

std::optional<int> number_of(const char* variable) {
  const char* const text = std::getenv(variable);
  if (text == nullptr) return std::nullopt;
  const std::string_view digits = text;
  int value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc{} || end != digits.data() + digits.size() || value < 0) {
    throw std::invalid_argument(std::string(variable) + ": expected a number of 0 or more, got \"" +
                                text + "\"; correct or unset it");
  }
  return value;
}

}  // namespace

struct Machine::Hwloc : LoadedTopology {
  using LoadedTopology::LoadedTopology;
};

Machine::Machine(std::shared_ptr<const Hwloc> hwloc) : hwloc_(std::move(hwloc)) {
  hwloc_topology_t topology = hwloc_->get();
  const Bitmap allowed;
  if (hwloc_topology_is_thissystem(topology) == 0 ||
      hwloc_get_cpubind(topology, allowed.get(), HWLOC_CPUBIND_PROCESS) != 0) {
    hwloc_bitmap_copy(allowed.get(), hwloc_topology_get_allowed_cpuset(topology));
  }
  for (hwloc_obj_t node = nullptr;
       (node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node)) != nullptr;) {
    nodes_.push_back({.number = static_cast<int>(node->os_index),
                      .bytes = static_cast<int64_t>(node->attr->numanode.local_memory)});
  }
  // Where the machine does not tell cores from hardware threads, each thread is one.
  const bool has_cores = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE) > 0;
  const hwloc_obj_type_t type = has_cores ? HWLOC_OBJ_CORE : HWLOC_OBJ_PU;
  for (hwloc_obj_t object = nullptr;
       (object = hwloc_get_next_obj_by_type(topology, type, object)) != nullptr;) {
    Core core = core_of(topology, object, allowed.get());
    if (!core.cpus.empty()) cores_.push_back(std::move(core));
  }
  if (cores_.empty()) {
    throw std::runtime_error(
        "the cores of this process: expected at least one that hwloc knows, got zero; see the "
        "process's affinity mask (taskset -p) and its cgroup's cpuset.cpus");
  }
}

Machine::Machine(const std::string& synthetic)
    : Machine(
          std::make_shared<const Hwloc>(LoadedTopology::Options{.synthetic = synthetic.c_str()})) {}

const Machine& Machine::here() {
  static const Machine machine(std::make_shared<const Hwloc>(LoadedTopology::Options{}));
  return machine;
}

int Machine::packages() const {
  return std::max(1, hwloc_get_nbobjs_by_type(hwloc_->get(), HWLOC_OBJ_PACKAGE));
}

CoreSet Machine::cores_of(int node) const {
  CoreSet found;
  std::copy_if(cores_.begin(), cores_.end(), std::back_inserter(found),
               [&](const Core& core) { return core.node == node; });
  return found;
}

int Machine::node_of_pci(const std::string& bus_id) const {
  const LoadedTopology with_devices({.devices = HWLOC_TYPE_FILTER_KEEP_ALL});
  hwloc_obj_t device = hwloc_get_pcidev_by_busidstring(with_devices.get(), bus_id.c_str());
  if (device == nullptr) return kUnknownNode;
  hwloc_obj_t place = hwloc_get_non_io_ancestor_obj(with_devices.get(), device);
  // A bus that all nodes share is near to none of them.
  if (place == nullptr || hwloc_bitmap_weight(place->nodeset) != 1) return kUnknownNode;
  return first_node(place);
}

std::vector<CoreSet> Machine::core_sets(int ranks, const std::vector<int>& device_nodes) const {
  const auto count = static_cast<size_t>(std::max(ranks, 0));
  if (count == 0) {
    throw std::invalid_argument("core_sets: ranks: expected 1 or more, got " +
                                std::to_string(ranks) + "; a machine has at least one");
  }
  if (!device_nodes.empty() && device_nodes.size() != count) {
    throw std::invalid_argument("core_sets: device_nodes: expected one of each of " +
                                std::to_string(ranks) + " ranks or none at all, got " +
                                std::to_string(device_nodes.size()));
  }
  const bool near_devices =
      !device_nodes.empty() && std::all_of(device_nodes.begin(), device_nodes.end(),
                                           [&](int node) { return !cores_of(node).empty(); });
  std::vector<CoreSet> sets;
  std::map<int, size_t> placed;  // ranks by node
  for (size_t rank = 0; rank < count; ++rank) {
    if (near_devices) {
      const int node = device_nodes[rank];
      const auto of_node = std::count(device_nodes.begin(), device_nodes.end(), node);
      sets.push_back(part_of(cores_of(node), placed[node]++, static_cast<size_t>(of_node)));
    } else {
      sets.push_back(part_of(cores_, rank, count));
    }
  }
  return sets;
}

CoreSet own_core_set() {
  const auto either = [](const char* first, const char* second) {
    const std::optional<int> value = number_of(first);
    return value ? value : number_of(second);
  };
  const std::optional<int> rank = either("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK");
  const std::optional<int> ranks = either("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE");
  if (!rank || !ranks) return Machine::here().cores();
  if (*rank >= *ranks) {
    throw std::invalid_argument("local rank " + std::to_string(*rank) + " of " +
                                std::to_string(*ranks) +
                                " is impossible; correct or unset LOCAL_RANK and LOCAL_WORLD_SIZE");
  }
  return Machine::here().core_sets(*ranks)[static_cast<size_t>(*rank)];
}

int node_of(const CoreSet& cores) {
  std::map<int, int> on_node;
  for (const Core& core : cores) ++on_node[core.node];
  const auto most = std::max_element(
      on_node.begin(), on_node.end(),
      [](const auto& left, const auto& right) { return left.second < right.second; });
  if (most == on_node.end()) {
    throw std::invalid_argument("node_of: cores: expected at least one, got a set of zero cores");
  }
  return most->first;
}

std::string cpu_list(const CoreSet& cores) {
  const Bitmap cpus;
  set_cpus(cores, cpus);
  char* text = nullptr;
  hwloc_bitmap_list_asprintf(&text, cpus.get());
  std::string list = text;
  std::free(text);
  return list;
}

void bind_this_thread(const CoreSet& cores) {
  const Bitmap cpus;
  set_cpus(cores, cpus);
  if (hwloc_set_cpubind(Machine::here().hwloc_->get(), cpus.get(), HWLOC_CPUBIND_THREAD) != 0) {
    throw std::system_error(errno, std::generic_category(),
                            "the system does not bind a thread to the hardware threads \"" +
                                cpu_list(cores) + "\"; see the process's cgroup (cpuset.cpus)");
  }
}

struct BindingScope::Before {
  Bitmap cpus;
};

BindingScope::BindingScope(const CoreSet& cores) : before_(std::make_unique<Before>()) {
  if (hwloc_get_cpubind(Machine::here().hwloc_->get(), before_->cpus.get(), HWLOC_CPUBIND_THREAD) !=
      0) {
    throw std::system_error(errno, std::generic_category(),
                            "the system does not tell where a thread runs");
  }
  bind_this_thread(cores);
}

BindingScope::~BindingScope() {
  hwloc_set_cpubind(Machine::here().hwloc_->get(), before_->cpus.get(), HWLOC_CPUBIND_THREAD);
}

}  // namespace zeropage::device
