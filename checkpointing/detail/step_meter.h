// Measures a step for planning: its operators and their seconds, its values, and the bytes at each
// moment when one is saved, needed or released.
//
// Threads: the tape that records guards it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <c10/core/DeviceType.h>

#include "checkpointing/detail/recorded_forward.h"
#include "checkpointing/recorded_step.h"
#include "zeropage/ledger.h"

namespace zeropage::checkpointing::detail {

class StepMeter {
 public:
  // device: whose bytes count, of the current ledger.
  explicit StepMeter(c10::DeviceType device);

  void add_operator(const Operation& operation);
  void note_seconds(const Operation& operation);
  void add_value(const Value& value);
  // The value is overwritten in place before anybody saved it: in a replay, it and what follows lie in
  // one memory.
  void note_overwritten(const Value& value);

  // kept: by values so far. may_be_dropped: or it stays whatever is planned.
  void note_save(const Value& value, const KeptBytes& kept, bool may_be_dropped);
  void note_need(const Value& value, const KeptBytes& kept);
  void note_release(const Value& value, const KeptBytes& kept);
  // What was allocated since the last event is no part of the step: a replay's.
  void leave_out_what_was();

  const RecordedStep& step() const { return step_; }
  // By operator.
  const std::vector<size_t>& signatures() const { return signatures_; }
  const std::vector<std::string>& names() const { return names_; }

 private:
  void tick(Event event, const Value& value, const KeptBytes& kept);

  const c10::DeviceType device_;
  const std::shared_ptr<memory::Ledger> ledger_ = memory::Ledger::current();

  RecordedStep step_;
  std::vector<bool> needed_;  // [values]
  std::vector<size_t> signatures_;
  std::vector<std::string> names_;
};

}  // namespace zeropage::checkpointing::detail
