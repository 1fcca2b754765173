// Records what happens to a rank's bytes, pages and messages, for the steps that are asked for.
//
// While it is attached to a ledger it follows every block from its allocation on, so that it knows who made
// what is freed later, and what of it lives at a step's end. Between begin_step() and end_step() it keeps
// each event. Detached it gets none, and costs nothing.
//
// Lifetime: the ledger keeps it while it is attached. Threads: begin_step(), end_step(), attach() and
// detach() on one; events come from any.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "profile/detail/held_blocks.h"
#include "profile/detail/names.h"
#include "zeropage/event_sink.h"
#include "zeropage/ledger.h"
#include "zeropage/profile.h"

namespace zeropage::profile {

class Recorder final : public memory::EventSink, public std::enable_shared_from_this<Recorder> {
 public:
  static std::shared_ptr<Recorder> make(std::shared_ptr<memory::Ledger> ledger);

  // Throws if another one looks at the ledger.
  void attach();
  // Does nothing for one that is not attached.
  void detach();
  bool is_attached() const { return attached_; }

  // REQUIRES: is_attached(); steps do not overlap.
  void begin_step(int64_t step, const std::string& label = "");
  void end_step();

  // What was recorded so far, with the rank's number.
  RankProfile profile(int rank) const;

  void on_ledger(const memory::LedgerEvent& event) override;
  void on_page(const memory::PageEvent& event) override;
  void on_span(const memory::Span& span) override;

 private:
  using Clock = std::chrono::steady_clock;

  explicit Recorder(std::shared_ptr<memory::Ledger> ledger) : ledger_(std::move(ledger)) {}
  int64_t since_begin(Clock::time_point time) const;

  const std::shared_ptr<memory::Ledger> ledger_;

  // Owned by the thread that begins steps.
  bool attached_ = false;

  mutable std::mutex mutex_;  // taken under the ledger's, never the other way round
  // Guarded by mutex_.
  bool recording_ = false;
  Clock::time_point begin_;
  std::thread::id training_thread_;
  detail::Names names_;
  detail::HeldBlocks held_;
  std::vector<StepProfile> steps_;  // the last one is being recorded
};

}  // namespace zeropage::profile
