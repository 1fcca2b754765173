#include "profile/recorder.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include <torch/csrc/autograd/graph_task.h>

#include "profile/operator_names.h"
#include "zeropage/check.h"

namespace zeropage::profile {
namespace {

using memory::Account;
using memory::OwnerScope;
using memory::Span;

detail::HeldBlocks::ByAccount held_of(const memory::Ledger& ledger) {
  detail::HeldBlocks::ByAccount held;
  const auto set = [&](Account account, const memory::Breakdown& bytes) {
    held[static_cast<size_t>(account)] = bytes;
  };
  set(Account::kHost, ledger.now(c10::DeviceType::CPU));
  // A process has one kind of accelerator, so its name does not matter to the ledger.
  set(Account::kAccelerator, ledger.now(c10::DeviceType::CUDA));
  set(Account::kMeta, ledger.now(c10::DeviceType::Meta));
  set(Account::kHostTier, ledger.offloaded(memory::Tier::kHost));
  set(Account::kNvmeTier, ledger.offloaded(memory::Tier::kNvme));
  return held;
}

bool is_in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

// Events lie in order; a range's phase is known when it has ended.
void set_phase(std::vector<Change>& changes, const SpanRecord& range, Change::Phase phase) {
  const auto first = std::lower_bound(
      changes.begin(), changes.end(), range.begin_ns,
      [](const Change& change, int64_t time_ns) { return change.time_ns < time_ns; });
  for (auto change = first; change != changes.end() && change->time_ns <= range.end_ns; ++change) {
    if (change->phase == Change::Phase::kOther) change->phase = phase;
  }
}

}  // namespace

std::shared_ptr<Recorder> Recorder::make(std::shared_ptr<memory::Ledger> ledger) {
  return std::shared_ptr<Recorder>(new Recorder(std::move(ledger)));
}

void Recorder::attach() {
  TORCH_INTERNAL_ASSERT(!attached_);
  auto before = ledger_->sink().exchange(shared_from_this());
  if (before) ledger_->sink().exchange(before);
  ZP_CHECK(!before,
           "a profile of this rank's steps: another Profiler is recording them; end that one "
           "first, or record with it");
  attached_ = true;
  // Until nothing has changed between two looks: from there on each event is followed.
  for (;;) {
    int64_t events = 0;
    {
      const std::lock_guard lock(mutex_);
      held_.begin({});
      events = held_.events();
    }
    const auto now = held_of(*ledger_);
    const std::lock_guard lock(mutex_);
    if (held_.events() != events) continue;
    held_.begin(now);
    return;
  }
}

void Recorder::detach() {
  if (!std::exchange(attached_, false)) return;
  ledger_->sink().exchange(nullptr);
}

void Recorder::begin_step(int64_t step, const std::string& label) {
  TORCH_INTERNAL_ASSERT(attached_);
  const std::lock_guard lock(mutex_);
  TORCH_INTERNAL_ASSERT(!recording_);
  recording_ = true;
  training_thread_ = std::this_thread::get_id();
  StepProfile& profile = steps_.emplace_back();
  profile.step = step;
  profile.label = label;
  for (const memory::Breakdown& bytes : held_.now()) {
    profile.before.emplace_back(bytes.bytes.begin(), bytes.bytes.end());
  }
  profile.resident = held_.resident_pages();
  begin_ = Clock::now();
}

void Recorder::end_step() {
  const std::lock_guard lock(mutex_);
  TORCH_INTERNAL_ASSERT(recording_);
  recording_ = false;
  StepProfile& profile = steps_.back();
  profile.duration_ns = since_begin(Clock::now());
  profile.held = held_.holdings();
}

RankProfile Recorder::profile(int rank) const {
  const std::lock_guard lock(mutex_);
  return {.rank = rank, .names = names_.all(), .formula = {}, .steps = steps_};
}

int64_t Recorder::since_begin(Clock::time_point time) const {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time - begin_).count();
}

void Recorder::on_ledger(const memory::LedgerEvent& event) {
  const OwnerScope::Owner scope = OwnerScope::current();
  const bool is_scoped = *scope.name != '\0';
  const std::lock_guard lock(mutex_);
  const detail::HeldBlocks::Owner owner{
      names_.index_of(is_scoped ? scope.name : OperatorNames::outermost()),
      names_.index_of(scope.page)};
  Change change = held_.follow(event, owner);
  if (!recording_) return;
  change.time_ns = since_begin(Clock::now());
  if (is_in_backward()) change.phase = Change::Phase::kBackward;
  steps_.back().changes.push_back(change);
}

void Recorder::on_page(const memory::PageEvent& event) {
  const std::lock_guard lock(mutex_);
  const NameIndex page = names_.index_of(event.page);
  if (event.pages == "parameter") held_.follow(event.change, page);
  if (!recording_) return;
  steps_.back().pages.push_back({.time_ns = since_begin(Clock::now()),
                                 .what = static_cast<PageRecord::What>(event.change),
                                 .page = page,
                                 .pages = names_.index_of(event.pages),
                                 .bytes = event.bytes});
}

void Recorder::on_span(const Span& span) {
  const std::lock_guard lock(mutex_);
  if (!recording_) return;
  StepProfile& step = steps_.back();
  // What began before the step is shown from its begin on.
  const SpanRecord record{.begin_ns = std::max<int64_t>(since_begin(span.begin), 0),
                          .end_ns = std::max<int64_t>(since_begin(span.end), 0),
                          .what = static_cast<SpanRecord::What>(span.what),
                          .name = names_.index_of(span.name),
                          .of = names_.index_of(span.of),
                          .bytes = span.bytes,
                          .on_training_thread = std::this_thread::get_id() == training_thread_};
  if (span.what == Span::What::kRange && span.name == "forward") {
    set_phase(step.changes, record, Change::Phase::kForward);
  }
  if (span.what == Span::What::kRange && span.name == "step") {
    set_phase(step.changes, record, Change::Phase::kStep);
  }
  step.spans.push_back(record);
}

}  // namespace zeropage::profile
