// Records chosen steps of a training loop: each allocation with its owner, which pages came and went, what was
// sent, and what was waited for. Shown as a page, by
// Perfetto, or in the terminal (zp report).
//
//   zeropage::profile::Profiler profiler(world, {.first_step = 3, .last_step = 5});
//   for (int64_t step = 0; step < steps; ++step) {
//     const auto recorded = profiler.step(step);  // until the end of the block
//     ...                                         // forward, backward, step
//   }
//   profiler.write({.page = "report.html", .profile = "profile.json"});  // on all ranks
//
// Recording does not change results. Steps that are not chosen cost nothing. A chosen one takes some 0.2 us for
// each allocation and each operator, and 40 to 80 bytes for each allocation and each free until the profile
// is written.
// On an accelerator times are of the host, which is ahead of it: bytes are right, waits for the device are
// not seen.
//
// Lifetime: shares the world and the ledger. Threads: the training thread, whose ledger is the rank's.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "zeropage/ledger.h"
#include "zeropage/profile.h"
#include "zeropage/world.h"

namespace zeropage::profile {

struct ProfilerOptions {
  // Steps first_step to last_step, both included, as they are numbered in step().
  int64_t first_step = 0;
  int64_t last_step = 0;
  std::string title = "A training run";  // of the report
};

class Profiler {
 public:
  // A step that is recorded while it lives, if it is one of those that were chosen.
  class Step {
   public:
    ~Step();
    Step(Step&& other) noexcept : profiler_(std::exchange(other.profiler_, nullptr)) {}
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    friend class Profiler;
    explicit Step(Profiler* profiler) : profiler_(profiler) {}
    Profiler* profiler_;  // null: not chosen
  };

  // Throws for a range of steps that is empty.
  Profiler(comm::World world, ProfilerOptions options);
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  // label: stands beside the number in reports. Throws while another Profiler records this rank.
  [[nodiscard]] Step step(int64_t number, const std::string& label = "");

  // What this rank should hold from step to step, for the table. Without it there is no such column.
  void set_formula(const memory::Breakdown& bytes);
  // A line of the report's head: {"stage", "3"}. Later calls go below earlier ones.
  void note(const std::string& what, const std::string& value);

  // Rank 0 gets all ranks'; the others an empty one. Collective, and sends what was recorded.
  Profile join() const;
  // The same in files. Collective; rank 0 writes. Throws on all ranks for names that do not fit, or a file that
  // cannot be written.
  void write(const ProfileFiles& files) const;

 private:
  void end_step();
  void stop_looking();

  const comm::World world_;
  const ProfilerOptions options_;
  struct Parts;
  const std::unique_ptr<Parts> parts_;
};

// Calls `step` once to let it make what stays, and then `steps` times, which must be 3 or more. Returns a line for
// everything that the calling thread's ledger holds more of after each of them, with its owner; "": nothing. Throws
// for fewer steps, and what `step` throws.
std::string growth_over(int64_t steps, const std::function<void()>& step);

}  // namespace zeropage::profile
