// This rank's place in its world, read from the variables that launchers set, and the store where ranks meet.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace zeropage::comm {

struct Place {
  int rank = 0;
  int world_size = 1;
  // -1: the launcher did not say; the world finds out by host names.
  int local_rank = -1;
  int local_world_size = -1;

  // What the ranks of one host, and no others, have in common; "": the world finds out.
  std::string host;

  // Where the store is: a host and port that rank 0 (or the launcher's agent) serves, or a shared
  // file.
  std::string master_address;
  uint16_t master_port = 0;
  bool launcher_serves_store = false;
  // Rank 0's, of our launcher: a socket that is bound to the port, to be listened at. -1: none.
  int store_socket = -1;
  std::string rendezvous_file;

  // Which start of the ranks this is, where the launcher starts them again: torchrun --max-restarts over one
  // store, Slurm a job that was requeued.
  std::string attempt;

  std::string launcher;  // for messages: "torchrun", "Slurm", "Open MPI", "none"
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

}  // namespace zeropage::comm
