#include <arpa/inet.h>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <ifaddrs.h>
#include <iostream>
#include <limits>
#include <memory>
#include <net/if.h>
#include <netdb.h>
#include <numeric>
#include <sstream>
#include <string_view>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/detail/broken_pipe.h"
#include "comm/watch/short_lookups.h"
#include "comm/watch/store_calls.h"
#include "comm/watch/store_socket.h"
#include "zeropage/check.h"
#include "zeropage/world.h"

namespace zeropage::comm {
namespace {

constexpr const char* kNoLauncher = "none";
constexpr std::string_view kFileScheme = "file://";
// Job ids become ports in this range when the launcher names none, so that jobs on one host rarely
// collide. It ends where Linux's ephemeral ports begin, any of which may be somebody's, such as srun's.
constexpr int kFirstDerivedPort = 20000;
constexpr int kDerivedPorts = 12768;

class Reader {
 public:
  explicit Reader(const Variables& variables) : variables_(variables) {}

  std::optional<std::string> text(const std::string& name) const {
    auto value = variables_(name);
    if (value && value->empty()) return std::nullopt;
    return value;
  }

  std::optional<int> integer(const std::string& name, int least, int most) const {
    const auto value = text(name);
    if (!value) return std::nullopt;
    int number = 0;
    const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), number);
    ZP_CHECK(error == std::errc{} && end == value->data() + value->size() && number >= least &&
                 number <= most,
             "environment: ", name, "=", *value, " is not a whole number from ", least, " to ",
             most, "; correct or unset it");
    return number;
  }

  int required(const std::string& name, const std::string& because, int least, int most) const {
    const auto value = integer(name, least, most);
    ZP_CHECK(value.has_value(), "environment: ", because, " but ", name,
             " is not; set both or neither");
    return *value;
  }

 private:
  const Variables& variables_;
};

constexpr int kMaxRanks = std::numeric_limits<int>::max();

void check_ranks(const Place& place, const std::string& rank_name, const std::string& size_name) {
  ZP_CHECK(place.rank < place.world_size, "environment: ", rank_name, "=", place.rank, " and ",
           size_name, "=", place.world_size, " contradict each other; ranks go from 0 to ",
           place.world_size - 1);
  if (place.local_rank < 0 || place.local_world_size < 0) return;
  ZP_CHECK(place.local_rank < place.local_world_size && place.local_world_size <= place.world_size,
           "environment: local rank ", place.local_rank, " of ", place.local_world_size,
           " local ranks in a world of ", place.world_size,
           " is impossible; correct or unset LOCAL_RANK and LOCAL_WORLD_SIZE");
}

void read_meeting_point(const Reader& reader, const std::optional<std::string>& default_address,
                        const std::string& job_id, Place& place) {
  if (const auto rendezvous = reader.text("ZEROPAGE_RENDEZVOUS")) {
    ZP_CHECK(rendezvous->starts_with(kFileScheme) && rendezvous->size() > kFileScheme.size() &&
                 (*rendezvous)[kFileScheme.size()] == '/',
             "environment: ZEROPAGE_RENDEZVOUS=", *rendezvous,
             " is not understood; expected file:///absolute/path");
    place.rendezvous_file = rendezvous->substr(kFileScheme.size());
    return;
  }
  const auto address = reader.text("MASTER_ADDR");
  const auto port = reader.integer("MASTER_PORT", 1, 65535);
  if (place.world_size == 1 && !address && !default_address) return;
  ZP_CHECK(address || default_address, "environment: a world of ", place.world_size, " (from ",
           place.launcher, ") needs MASTER_ADDR, the host of rank 0; ",
           "set it, or ZEROPAGE_RENDEZVOUS=file:///path");
  ZP_CHECK(port || !job_id.empty(), "environment: a world of ", place.world_size, " (from ",
           place.launcher, ") needs MASTER_PORT, a free port on the host of rank 0; set it");
  place.master_address = address ? *address : *default_address;
  const size_t derived = std::hash<std::string>{}(job_id) % kDerivedPorts;
  place.master_port =
      static_cast<uint16_t>(port ? *port : kFirstDerivedPort + static_cast<int>(derived));
}

// RANK and WORLD_SIZE that a batch script has exported are the same in all of srun's tasks. torchrun and `zp run`
// set them for each process, and say where it is among the local ones.
void check_against_slurm(const Reader& reader, const Place& place) {
  const auto task = reader.integer("SLURM_PROCID", 0, kMaxRanks);
  const auto tasks = reader.integer("SLURM_STEP_NUM_TASKS", 1, kMaxRanks);
  if (!task || tasks != place.world_size || place.world_size == 1 || place.local_rank >= 0) return;
  ZP_CHECK(
      *task == place.rank, "environment: RANK=", place.rank, " and SLURM_PROCID=", *task,
      " contradict each other, as they do where a batch script exports RANK for all tasks; leave "
      "RANK and WORLD_SIZE out, since Slurm's own variables are read");
}

Place read_torchrun(const Reader& reader) {
  Place place;
  place.launcher = reader.text("TORCHELASTIC_RUN_ID") ? "torchrun" : "RANK and WORLD_SIZE";
  place.rank = reader.required("RANK", "WORLD_SIZE is set", 0, kMaxRanks);
  place.world_size = reader.required("WORLD_SIZE", "RANK is set", 1, kMaxRanks);
  place.local_rank = reader.integer("LOCAL_RANK", 0, kMaxRanks).value_or(-1);
  place.local_world_size = reader.integer("LOCAL_WORLD_SIZE", 1, kMaxRanks).value_or(-1);
  check_ranks(place, "RANK", "WORLD_SIZE");
  place.launcher_serves_store = reader.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  place.attempt = reader.text("TORCHELASTIC_RESTART_COUNT").value_or("");
  place.store_socket = reader.integer("ZEROPAGE_STORE_SOCKET", 0, kMaxRanks).value_or(-1);
  check_against_slurm(reader, place);
  read_meeting_point(reader, std::nullopt, "", place);
  return place;
}

Place read_open_mpi(const Reader& reader) {
  Place place;
  place.launcher = "Open MPI";
  place.rank = reader.required("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE is set", 0, kMaxRanks);
  place.world_size =
      reader.required("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK is set", 1, kMaxRanks);
  place.local_rank = reader.integer("OMPI_COMM_WORLD_LOCAL_RANK", 0, kMaxRanks).value_or(-1);
  place.local_world_size = reader.integer("OMPI_COMM_WORLD_LOCAL_SIZE", 1, kMaxRanks).value_or(-1);
  check_ranks(place, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  const bool one_host = place.local_world_size == place.world_size;
  const std::string job = reader.text("PMIX_NAMESPACE").value_or("");
  read_meeting_point(reader, one_host ? std::optional<std::string>("127.0.0.1") : std::nullopt, job,
                     place);
  return place;
}

constexpr const char* kStartWithSrun =
    "; srun sets all of them alike, so start the program with srun, and neither set them by hand "
    "nor keep those "
    "of another job";

// A count of at least 1 that `text` begins with, which is taken off it; none: 0.
int take_count(std::string_view& text) {
  int count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (error != std::errc() || count < 1) return 0;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return count;
}

bool take(std::string_view& text, std::string_view expected) {
  if (!text.starts_with(expected)) return false;
  text.remove_prefix(expected.size());
  return true;
}

// "2(x3),1": of each node of a step. By hand: std::regex in a program is the one that LibTorch then runs, too.
std::vector<int> tasks_of_nodes(const std::string& text) {
  constexpr int kMostNodes = 1'000'000;
  std::vector<int> tasks;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    std::string_view rest = part;
    const int of_node = take_count(rest);
    int times = 1;
    if (take(rest, "(x")) {
      times = take_count(rest);
      if (!take(rest, ")")) times = 0;
    }
    ZP_CHECK(of_node > 0 && times > 0 && times <= kMostNodes && rest.empty(),
             "environment: SLURM_STEP_TASKS_PER_NODE=", text,
             " is no list of tasks, such as 2(x3),1", kStartWithSrun);
    tasks.insert(tasks.end(), static_cast<size_t>(times), of_node);
  }
  return tasks;
}

// What srun says of the step's nodes, against the rank's place in it.
void check_slurm_nodes(const Reader& reader, const Place& place) {
  const auto list = reader.text("SLURM_STEP_TASKS_PER_NODE");
  if (!list) return;
  const std::vector<int> tasks = tasks_of_nodes(*list);
  const int64_t all = std::accumulate(tasks.begin(), tasks.end(), int64_t{0});
  ZP_CHECK(all == place.world_size, "environment: SLURM_STEP_TASKS_PER_NODE=", *list, " are ", all,
           " tasks and SLURM_NTASKS=", place.world_size, " contradict each other", kStartWithSrun);
  const auto nodes = reader.integer("SLURM_STEP_NUM_NODES", 1, kMaxRanks);
  ZP_CHECK(!nodes || *nodes == static_cast<int>(tasks.size()),
           "environment: SLURM_STEP_TASKS_PER_NODE=", *list, " is of ", tasks.size(),
           " nodes and SLURM_STEP_NUM_NODES=", *nodes, " contradict each other", kStartWithSrun);
  const auto node = reader.integer("SLURM_NODEID", 0, kMaxRanks);
  if (!node) return;
  ZP_CHECK(*node < static_cast<int>(tasks.size()), "environment: SLURM_NODEID=", *node,
           " and SLURM_STEP_TASKS_PER_NODE=", *list, ", which is of ", tasks.size(),
           " nodes, contradict each other", kStartWithSrun);
  const int here = tasks[static_cast<size_t>(*node)];
  ZP_CHECK(place.local_rank < here, "environment: SLURM_LOCALID=", place.local_rank, " and the ",
           here, " tasks that SLURM_STEP_TASKS_PER_NODE=", *list,
           " has on node SLURM_NODEID=", *node, " contradict each other", kStartWithSrun);
}

Place read_slurm(const Reader& reader) {
  Place place;
  place.launcher = "Slurm";
  place.rank = reader.required("SLURM_PROCID", "SLURM_NTASKS is set", 0, kMaxRanks);
  place.world_size = reader.required("SLURM_NTASKS", "SLURM_PROCID is set", 1, kMaxRanks);
  place.local_rank = reader.integer("SLURM_LOCALID", 0, kMaxRanks).value_or(-1);
  check_ranks(place, "SLURM_PROCID", "SLURM_NTASKS");
  const auto step = reader.text("SLURM_STEP_ID");
  // A batch script has the variables of task 0, and Slurm starts it once.
  ZP_CHECK(
      step || place.world_size == 1, "environment: SLURM_NTASKS=", place.world_size,
      " without SLURM_STEP_ID means that Slurm's batch script started this process, and no other; "
      "start one for each task: srun my_trainer");
  const auto tasks = reader.integer("SLURM_STEP_NUM_TASKS", 1, kMaxRanks);
  ZP_CHECK(!tasks || *tasks == place.world_size, "environment: SLURM_STEP_NUM_TASKS=", *tasks,
           " and SLURM_NTASKS=", place.world_size, " contradict each other", kStartWithSrun);
  check_slurm_nodes(reader, place);
  // Rank 0 is on the first node of the step, which may be another than the job's.
  auto nodes = reader.text("SLURM_STEP_NODELIST");
  if (!nodes) nodes = reader.text("SLURM_JOB_NODELIST");
  place.attempt = reader.text("SLURM_RESTART_COUNT").value_or("");
  std::string job = reader.text("SLURM_JOB_ID").value_or("");
  // Steps of a job may run at once, and a job that is started again may meet ranks of its former start.
  if (!job.empty()) job = c10::str(job, ".", step.value_or(""), ".", place.attempt);
  read_meeting_point(reader, nodes ? std::optional(first_host(*nodes)) : std::nullopt, job, place);
  return place;
}

}  // namespace

std::optional<std::string> environment_variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

Place read_place(const Variables& variables) {
  const Reader reader(variables);
  if (reader.text("RANK") || reader.text("WORLD_SIZE")) return read_torchrun(reader);
  if (reader.text("OMPI_COMM_WORLD_RANK") || reader.text("OMPI_COMM_WORLD_SIZE")) {
    return read_open_mpi(reader);
  }
  // SLURM_NTASKS alone is an allocation's shell, outside srun: nobody started ranks.
  if (reader.text("SLURM_PROCID")) return read_slurm(reader);
  Place alone;
  alone.launcher = kNoLauncher;
  alone.local_rank = 0;
  alone.local_world_size = 1;
  return alone;
}

bool launched_by_environment(const Variables& variables) {
  return read_place(variables).launcher != kNoLauncher;
}

namespace {

// The socket that rank 0 is to listen at; nothing: c10d makes one, at all addresses.
std::optional<int> socket_for_store(const Place& place) {
  if (place.store_socket >= 0 &&
      detail::is_unused_socket_at(place.store_socket, place.master_port)) {
    return place.store_socket;
  }
  const bool one_host = place.world_size == place.local_world_size;
  const detail::StoreSocket bound =
      detail::bind_store_socket(place.master_address, place.master_port, one_host);
  if (!bound.why_everywhere.empty()) {
    std::cerr << c10::str(
                     "zeropage: the store where ranks meet listens at all addresses of this host, "
                     "port ",
                     place.master_port, ": ", bound.why_everywhere,
                     ". Whoever reaches that port can stop this run (SECURITY.md); set "
                     "MASTER_ADDR to this host's address in the ranks' network\n")
              << std::flush;
  }
  return bound.fd >= 0 ? std::optional(bound.fd) : std::nullopt;
}

}  // namespace

c10::intrusive_ptr<c10d::Store> open_store(const Place& place, std::chrono::milliseconds deadline) {
  if (!place.rendezvous_file.empty()) {
    return c10::make_intrusive<c10d::FileStore>(place.rendezvous_file, place.world_size);
  }
  if (place.world_size == 1) return c10::make_intrusive<c10d::HashStore>();
  c10d::TCPStoreOptions options;
  options.port = place.master_port;
  options.isServer = place.rank == 0 && !place.launcher_serves_store;
  options.waitWorkers = false;  // we count the ranks ourselves, to name the missing ones
  options.timeout = deadline;
  // c10d asks the name service about each address that refuses it, for a message: seconds, where
  // that does not answer. So it is not let try before somebody listens.
  const auto give_up_at = std::chrono::steady_clock::now() + deadline;
  while (!options.isServer && detail::is_loopback(place.master_address) &&
         !detail::is_listened_to(place.master_port)) {
    ZP_CHECK(std::chrono::steady_clock::now() < give_up_at, "rank ", place.rank, " of ",
             place.world_size, " cannot reach the store at ", place.master_address, ":",
             place.master_port, " (MASTER_ADDR:MASTER_PORT): nothing has listened there for ",
             static_cast<double>(deadline.count()) / 1000.0,
             " s; is rank 0 running, is the address right?");
    ZP_CHECK(!place.gone || place.gone().empty(), "rank ", place.rank, " of ", place.world_size,
             " does not meet the others: another rank has ended meanwhile");
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (options.isServer) options.masterListenFd = socket_for_store(place);
  // For the thread that serves it, which is started here.
  const detail::BrokenPipeScope broken_pipe;
  const detail::ShortLookups lookups(place.master_address);
  try {
    return c10::make_intrusive<c10d::TCPStore>(place.master_address, options);
  } catch (const std::exception& error) {
    const std::string reason = memory::message_of(error);
    ZP_THROW("rank ", place.rank, " of ", place.world_size,
             options.isServer ? " cannot serve" : " cannot reach", " the store at ",
             place.master_address, ":", place.master_port, " (MASTER_ADDR:MASTER_PORT",
             options.isServer ? "): the port may be taken, choose another. c10d says: "
                              : "): is rank 0 running, is the address right? c10d says: ",
             reason.substr(0, reason.find('\n')));
  }
}

std::string first_host(const std::string& slurm_node_list) {
  const size_t bracket = slurm_node_list.find('[');
  const size_t comma = slurm_node_list.find(',');
  if (bracket == std::string::npos || comma < bracket) return slurm_node_list.substr(0, comma);
  const size_t close = slurm_node_list.find(']', bracket);
  ZP_CHECK(close != std::string::npos,
           "environment: SLURM_STEP_NODELIST or SLURM_JOB_NODELIST=", slurm_node_list,
           " has no closing bracket; set MASTER_ADDR");
  const size_t number_end = slurm_node_list.find_first_of(",-]", bracket);
  const std::string number = slurm_node_list.substr(bracket + 1, number_end - bracket - 1);
  const size_t host_end = slurm_node_list.find(',', close);
  return slurm_node_list.substr(0, bracket) + number +
         slurm_node_list.substr(close + 1,
                                host_end == std::string::npos ? host_end : host_end - close - 1);
}

namespace {

// The first address of an interface that is up which other hosts can reach by IPv4; "" if
// there is none.
std::string first_outside_address() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return "";
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owned(list, &freeifaddrs);
  for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr || at->ifa_addr->sa_family != AF_INET ||
        (at->ifa_flags & IFF_UP) == 0)
      continue;
    std::array<char, NI_MAXHOST> text{};
    if (getnameinfo(at->ifa_addr, sizeof(sockaddr_in), text.data(), text.size(), nullptr, 0,
                    NI_NUMERICHOST) != 0) {
      continue;
    }
    if (!detail::is_loopback(text.data())) return text.data();
  }
  return "";
}

}  // namespace

std::string address_for_peers(const Place& place) {
  constexpr const char* kLoopback = "127.0.0.1";
  if (place.world_size == place.local_world_size) return kLoopback;
  if (const auto chosen = environment_variable("ZEROPAGE_ADDRESS")) return *chosen;
  if (place.master_address.empty()) {
    std::array<char, 256> name{};
    gethostname(name.data(), name.size() - 1);
    return name.data();
  }
  // Connecting a datagram socket sends nothing; it only makes the kernel choose the interface.
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(place.master_port);
  ZP_CHECK(getaddrinfo(place.master_address.c_str(), port.c_str(), &hints, &found) == 0,
           "MASTER_ADDR=", place.master_address, " has no address; correct it");
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(found, &freeaddrinfo);
  const int probe = socket(found->ai_family, SOCK_DGRAM, 0);
  sockaddr_storage own{};
  socklen_t length = sizeof(own);
  std::array<char, NI_MAXHOST> text{};
  const bool known = probe >= 0 && connect(probe, found->ai_addr, found->ai_addrlen) == 0 &&
                     getsockname(probe, reinterpret_cast<sockaddr*>(&own), &length) == 0 &&
                     getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text.data(),
                                 text.size(), nullptr, 0, NI_NUMERICHOST) == 0;
  if (probe >= 0) close(probe);
  ZP_CHECK(known, "no network interface of this host reaches MASTER_ADDR=", place.master_address,
           "; set ZEROPAGE_ADDRESS to this host's address");
  if (!detail::is_loopback(text.data())) return text.data();
  // Rank 0's host may know itself by a loopback address (Debian writes 127.0.1.1 into /etc/hosts);
  // its peers do not.
  const std::string outside = first_outside_address();
  ZP_CHECK(!outside.empty(),
           "the ranks are on several hosts, but this one has only loopback addresses towards ",
           "MASTER_ADDR=", place.master_address,
           "; set ZEROPAGE_ADDRESS to its address in their network");
  return outside;
}

}  // namespace zeropage::comm
