// What a launcher that starts ranks again and its ranks tell each other, in memory that all of them have mapped.
//
// A *generation* is one meeting of the ranks, from 0 on. When a rank ends or leaves its loop with an error, the launcher begins the next
// one: it writes where the ranks meet, and for whose sake, and starts those ranks whose processes have ended. A rank that lives leaves
// its generation, and joins the next.
//
// Lifetime: the memory has no name, and goes with the last process that has it mapped.
// Threads: any; the launcher alone begins generations and closes them. A process may be killed at any moment: each word is written at
// once.
// Units: ports, nanoseconds of CLOCK_MONOTONIC, which all processes of a host share.
// Throws: std::system_error where there is no memory, std::runtime_error where the memory is not a launcher's.
#pragma once

#include <cstdint>
#include <string>

#include "comm/launcher/file_descriptor.h"

namespace zeropage::comm::detail {

inline constexpr int kMostRestarts = 1000;

// The variable that says where a rank finds the memory.
inline constexpr const char* kGenerationsVariable = "ZEROPAGE_GENERATIONS";
// The folder for copies of the training state, which lives as long as the launcher.
inline constexpr const char* kCopiesVariable = "ZEROPAGE_COPIES";

// Why there is a generation.
enum class BeginCause : int32_t {
  kStart,   // the first one
  kSignal,  // a rank was killed by `detail`
  kExit,    // a rank ended by itself, with the exit code `detail`
  kLeft,    // a rank left its loop with an error; its process lives
};

struct GenerationBegin {
  BeginCause cause = BeginCause::kStart;
  int32_t detail = 0;
  int32_t rank = -1;      // whose end it was
  int32_t port = 0;       // of the store
  int64_t failed_at = 0;  // when that was noticed
  // Written by rank 0 when training goes on in this generation; -1: it does not yet.
  int64_t resumed_step = -1;
  int64_t resumed_at = -1;

  // "rank 2 was killed by signal 9"
  std::string words() const;
};

class Generations {
 public:
  // For a launcher. restarts: generations behind the first one.
  static Generations create(int ranks, int restarts, int port);
  // For a rank; path: the launcher's path().
  static Generations open(const std::string& path);

  Generations(Generations&& other) noexcept;
  Generations& operator=(Generations&&) = delete;
  ~Generations();

  // Where other processes of this user find it while this one lives.
  std::string path() const;
  int ranks() const;
  int restarts() const;

  // The newest.
  int current() const;
  GenerationBegin begin_of(int generation) const;
  // No other begins: ranks that have left end with their errors.
  bool is_closed() const;

  // Launcher. REQUIRES: current() < restarts().
  void begin(const GenerationBegin& next);
  void close();

  // Rank 0.
  void note_resume(int generation, int64_t step);

  // Rank: it is in that generation, and no longer in one before; it has left it.
  void join(int rank, int generation);
  // blamed: the rank that its error says was lost; -1: the error is its own.
  void leave(int rank, int generation, int blamed);
  // Rank, before it leaves: its memory did not suffice. The first of a generation counts.
  void note_out_of_memory(int rank, int generation);
  // The rank whose memory did not suffice in that generation; -1: none has said so.
  int out_of_memory(int generation) const;
  // Its training has ended.
  void finish(int rank);
  bool has_finished(int rank) const;
  // The newest that the rank has joined, and left; -1: none.
  int joined(int rank) const;
  int left(int rank) const;
  // When it left that, and whom it blames.
  int64_t left_at(int rank) const;
  int blamed(int rank) const;

 private:
  struct Memory;

  Generations(FileDescriptor descriptor, void* memory, size_t bytes);
  const Memory& memory() const { return *static_cast<const Memory*>(memory_); }
  Memory& memory() { return *static_cast<Memory*>(memory_); }

  FileDescriptor descriptor_;
  void* memory_;
  size_t bytes_;
};

// Now, on the clock of failed_at.
int64_t monotonic_nanoseconds();

}  // namespace zeropage::comm::detail
