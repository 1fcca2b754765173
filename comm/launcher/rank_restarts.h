// Which ranks of a launch are started again, and when a new generation of them begins.
//
// A rank that ends with a failure, or leaves its loop with an error, ends its generation: the ranks meet again in the next one. What
// ends or leaves later, because of that, only follows. A rank that does neither within the grace is killed, and started again.
//
// Threads: the launcher's only. Throws: std::system_error where there is no port or memory.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/launcher/copies_folder.h"
#include "comm/launcher/generations.h"
#include "comm/launcher/rank_environment.h"
#include "comm/launcher/rank_process.h"
#include "zeropage/launcher.h"

namespace zeropage::comm::detail {

class RankRestarts {
 public:
  // say: prints a line of the launcher's. REQUIRES: options.restarts > 0.
  RankRestarts(const LaunchOptions& options, int port,
               std::function<void(const std::string& text)> say);

  // Whether a rank that ended so is to be started again; it is taken to be.
  bool takes(int rank, const RankEnd& end);
  // To be called every kLook. Returns the ranks that are to be killed, for they stay in a generation that has ended.
  std::vector<int> look();
  // Nothing is started again from here on: ranks that have left end with their errors.
  void close() { generations_.close(); }

  // For ranks of the newest generation.
  void complete(RankEnvironment& environment) const;

  static constexpr std::chrono::milliseconds kLook{50};

 private:
  using Clock = std::chrono::steady_clock;

  bool can_begin() const;
  void begin(BeginCause cause, int detail, int rank, int64_t failed_at);
  std::optional<int> first_to_leave() const;

  const std::chrono::milliseconds grace_;
  const std::function<void(const std::string&)> say_;
  Generations generations_;
  const CopiesFolder copies_;
  PortSocket store_;  // of the newest generation, so that nobody else gets the port
  std::optional<Clock::time_point> kill_at_;
};

}  // namespace zeropage::comm::detail
