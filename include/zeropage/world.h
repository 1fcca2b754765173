// `World`: the ranks of a job, what they do together, and how they find each other.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "zeropage/communicator.h"
#include "zeropage/launcher.h"

// Ranks as threads of one process, for tests: World::threads(n, function) in zeropage/world.h.
//
//   zeropage::World::threads(2, [](zeropage::World& world) {
//     EXPECT_EQ(world.sum(1.0), 2.0);
//   });
//
// Each rank has a world, a ledger and LibTorch's intra-op pool to itself. What LibTorch has once a process the
// ranks share: the default generator of random numbers (torch::manual_seed), autocast's cache, and
// autograd's one thread a device; so ranks that share an accelerator cannot be threads. Which of the generator's
// numbers a rank draws depends on which thread comes first, so a run with dropout is not the same again. What backward
// computes again has the numbers of its forward (zeropage/checkpoint.h).

namespace zeropage::comm {

struct ThreadsOptions {
  // LibTorch's intra-op threads of each rank.
  int threads_per_rank = 1;
  // By rank, the name of its host: ranks with equal names are taken to be on one host. Default, none: all are on
  // one.
  std::vector<std::string> hosts = {};
  // Where ranks meet: a store for each rank, or one for all. Default, null: one in memory.
  std::function<c10::intrusive_ptr<c10d::Store>(int rank)> store = {};
};

// A rank threw. what(): "[rank 1/4] " and the message of the first that did, without LibTorch's stack.
class RanksFailed : public std::runtime_error {
 public:
  // errors: by rank, null for a rank that ended well. rank: of the first, which has one.
  RanksFailed(int rank, std::vector<std::exception_ptr> errors);

  // The rank that threw first.
  int rank() const { return rank_; }
  // What each rank threw, by rank; null: nothing. Errors of the others usually say that they lost the first.
  const std::vector<std::exception_ptr>& errors() const { return errors_; }

 private:
  int rank_;
  std::vector<std::exception_ptr> errors_;
};

// This rank's place in its world, read from the variables that launchers set, and the store where ranks meet.
struct Place {
  int rank = 0;
  int world_size = 1;
  // -1: the launcher did not say; the world finds out by host names.
  int local_rank = -1;
  int local_world_size = -1;

  // What the ranks of one host, and no others, have in common; "": the world finds out.
  std::string host = {};

  // Where the store is: a host and port that rank 0 (or the launcher's agent) serves, or a shared
  // file.
  std::string master_address = {};
  uint16_t master_port = 0;
  bool launcher_serves_store = false;
  // Rank 0's, of our launcher: a socket that is bound to the port, to be listened at. -1: none.
  int store_socket = -1;
  std::string rendezvous_file = {};

  // Which start of the ranks this is, where the launcher starts them again: torchrun --max-restarts over one
  // store, Slurm a job that was requeued.
  std::string attempt = {};
  // Asked while this rank waits for others to meet: those that its launcher knows to be gone. Default: it knows of none.
  std::function<std::vector<int>()> gone = {};

  std::string launcher = {};  // for messages: "torchrun", "Slurm", "Open MPI", "none"
};

using Variables = std::function<std::optional<std::string>(const std::string& name)>;

// The process's environment.
std::optional<std::string> environment_variable(const std::string& name);

// Reads, in this order: RANK and WORLD_SIZE with MASTER_ADDR and MASTER_PORT (torchrun, `zp run`,
// by hand); Open MPI's OMPI_COMM_WORLD_*; Slurm's SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID and those of the
// step (SLURM_STEP_*). ZEROPAGE_RENDEZVOUS=file:///shared/path replaces host and port by a file that
// all ranks see and that does not exist yet. None of them: a world of one. Throws on variables that
// are missing, unreadable or contradict each other.
Place read_place(const Variables& variables = environment_variable);

// Whether a launcher started this process as one rank of several, or of one.
bool launched_by_environment(const Variables& variables = environment_variable);

// Opens the store; rank 0 serves it unless the launcher does. It listens at the address that the others
// use; where this host does not have that address, or has it for itself alone, at all of its addresses, and
// says so on stderr. Throws if it cannot be reached within the deadline.
c10::intrusive_ptr<c10d::Store> open_store(const Place& place, std::chrono::milliseconds deadline);

// The first host of a Slurm node list: "gpu[03-05,9],login" -> "gpu03".
std::string first_host(const std::string& slurm_node_list);

// The address of this host that reaches the place's master, for peers to connect to.
std::string address_for_peers(const Place& place);

// The ranks that train together, and this rank's place among them.
//
// A World is a handle: copies share one communicator and one store. The last copy closes them: its destructor waits
// for this rank's unfinished operations, unless an exception is unwinding. Every rank should drop its own at the
// same point of the program.
// Threads: as the communicator, one thread at a time.
struct WorldOptions {
  // How long a rank waits for another that shows no life or, although it is in a call of ours, no
  // progress, before it ends with an error: in a collective, in texts, and when ranks meet. Default: 60 s.
  // The same on all ranks.
  std::chrono::milliseconds deadline = std::chrono::seconds(60);
  // How long a rank waits in one call for ranks that live and do work of their own meanwhile, as one that
  // evaluates or writes a picture. Such time does not count for the deadline. Default: 30 min. The same on
  // all ranks. 0: a rank that is late by half a second is an error.
  std::chrono::milliseconds busy_limit = std::chrono::minutes(30);
  // How often a rank that waits for a busy one says so on stderr, in a line. Default: 30 s.
  std::chrono::milliseconds report_interval = std::chrono::seconds(30);

  // Where tensors are: the host, or the accelerator of this type whose index is the local rank,
  // modulo those that the process sees. It becomes the calling thread's current device.
  c10::DeviceType device = c10::kCPU;

  Transport transport = Transport::kAuto;
  // kFixed gives the host's bits with NCCL, at the cost of a staging buffer and of time.
  ReductionOrder reduction_order = ReductionOrder::kFast;

  // Given the world's communicator, returns the one to use: to measure, delay or count what passes. Unset: the
  // world's own.
  std::function<std::unique_ptr<Communicator>(std::unique_ptr<Communicator>)> decorate = {};
};

struct SimulationOptions;

namespace detail {
struct WorldState;
}  // namespace detail

class World {
 public:
  // The world that the launcher's variables describe (zeropage/world.h); a world of one without
  // any. Collective. Errors of this process are prefixed "[rank 3/8]" from here on. Once a process:
  // a second world would serve the same port.
  static World from_environment(const WorldOptions& options = {});

  // Starts `ranks` processes on this host, calls `function` in each with its world, and returns
  // what main() should return (zeropage/launcher.h). One rank runs in this process. Call it first thing
  // in main().
  static int launch(int ranks, const std::function<int(World&)>& function,
                    const WorldOptions& options = {}, const LaunchOptions& launch = {});

  // Calls `function` as each of `ranks` ranks, each a thread of this process with its world, and returns
  // when all have ended (zeropage/world.h). For tests: training is faster with a process a rank. Where
  // one throws, the others end at their next call of this library; throws RanksFailed, which names the
  // first. What `function` returns is ignored.
  static void threads(int ranks, const std::function<void(World&)>& function,
                      const WorldOptions& options = {}, const ThreadsOptions& threads = {});

  // A rank at a place that the caller knows, meeting the others in `store`. Collective.
  World(const Place& place, c10::intrusive_ptr<c10d::Store> store,
        const WorldOptions& options = {});

  // One rank of a world without any other, for figures: tensors have sizes and no values
  // (zeropage/simulation.h), what ranks are about to do agrees, and every rank's text is
  // this one's.
  static World simulated(const SimulationOptions& options);

  int rank() const;
  int size() const;
  // Among the ranks of this host.
  int local_rank() const;
  int local_size() const;
  std::chrono::milliseconds deadline() const;
  // The communicator's: with an index, unless it is the host.
  c10::Device device() const;
  // This one among them, and at least 1. Ranks that a decorated communicator puts on a device, and
  // those of the host, are not counted.
  int ranks_on_device() const;

  Communicator& communicator() const;

  // Reductions of all ranks' values, for metrics: the same bits on all ranks. A NaN on any rank is a NaN. Whole
  // numbers are exact up to 2^53. Collective; a rank that calls alone, or another one, is named. Costs a
  // message of 8 bytes, and on an accelerator a wait for what was enqueued there.
  double sum(double value) const;
  double mean(double value) const;
  double min(double value) const;
  double max(double value) const;
  // Element by element: a new tensor of the same sizes, dtype and device, without a gradient. Sums and means
  // of bf16 and fp16 are made in fp32; sums of whole numbers wrap around as their dtype does. Throws on all
  // ranks alike where sizes, dtypes or devices differ, for means of whole numbers, and for dtypes but float,
  // double, bfloat16, half, int64, int32 and uint8. Costs a text round beside the reduction.
  at::Tensor sum(const at::Tensor& tensor) const;
  at::Tensor mean(const at::Tensor& tensor) const;
  at::Tensor min(const at::Tensor& tensor) const;
  at::Tensor max(const at::Tensor& tensor) const;

  // Every rank's text, by rank. Goes through the store, so it is for small things and before
  // anything else works. Collective; `topic` names it in errors. Costs each rank a few requests to the store; rank 0 writes all texts
  // as one, which every rank reads.
  std::vector<std::string> gather_text(const std::string& topic, const std::string& text) const;

  // Throws on all ranks alike unless all ranks pass the same lines; the message says which rank
  // differs from rank 0 in which line. Collective, and before the first collective of whatever it
  // protects.
  void check_agreement(const std::string& topic, const std::vector<std::string>& lines) const;

  // Rank 0 makes one answer of every rank's text, by rank; all get it. Where a rank is lost, shows no
  // life for the deadline, or is busy for the busy limit, all throw alike and nothing is decided.
  // decide: called on rank 0; must not throw. Collective. Texts and answers may have any length; every
  // rank reads the answer from the store.
  using Decide = std::function<std::string(const std::vector<std::string>& texts)>;
  std::string settle(const std::string& topic, const std::string& text, const Decide& decide) const;
  // The same for texts that are expected to be the same on all ranks: "", without a call of `decide`, where they are. Rank 0 compares
  // hashes of 64 bits, and reads the texts only where these differ.
  std::string settle_difference(const std::string& topic, const std::string& text,
                                const Decide& decide) const;

  // The ranks that pass the same colour, as a world of their own: ordered by key, and by rank here where keys
  // are equal. It meets in this one's store, has its options, device and hosts, a communicator of its own
  // (shared memory where its ranks share a host), and counts its own traffic. In errors ranks keep the numbers of the
  // first world. A rank that fails in one of its worlds ends in all of them, for the same cause. Collective; so is what
  // the new world does, over its ranks. Operations of two worlds may run at the same time; ranks that have several in
  // common call them in the same order. In a simulated world all ranks pass what this one passes.
  World split(int64_t color, int64_t key) const;
  // The name of rank `rank` in errors: its number in the world that all others were split from.
  int global_rank(int rank) const;
  // Which ranks these are, for messages: " along \"data\""; "" for all.
  const std::string& where() const;

  // How many modules these ranks run together so far, the same number on each: wrapped models, or layers of experts along an axis.
  // Messages say whose they are, so that ranks which use two alike in another order are told.
  int modules() const;
  void add_module() const;

  // The same ranks for another thread, or with another deadline: texts have their own order there, and
  // there is no communicator. All ranks call it in the same order among their texts.
  World beside(const std::string& name, std::chrono::milliseconds deadline) const;

 private:
  friend class Membership;
  friend class Mesh;
  using State = detail::WorldState;
  explicit World(std::shared_ptr<State> state) : state_(std::move(state)) {}
  [[noreturn]] void fail_to_connect(const std::exception& error) const;
  c10::Device choose_device(c10::DeviceType type);
  void connect(c10::Device device);
  void adopt(std::unique_ptr<Communicator> communicator);
  void begin_texts();
  World subset(const std::vector<int>& ranks, const std::string& where) const;

  std::shared_ptr<State> state_;
};

}  // namespace zeropage::comm
