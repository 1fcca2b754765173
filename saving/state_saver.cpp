#include <atomic>
#include <csignal>
#include <cstdio>
#include <mutex>
#include <thread>
#include <utility>

#include "device/topology.h"
#include "saving/detail/collective_errors.h"
#include "saving/detail/state_saving.h"
#include "state/file_writer.h"
#include "state/run_token.h"
#include "zero/model_parts.h"
#include "zero/tiers/tier_storage.h"
#include "zeropage/check.h"
#include "zeropage/saving.h"
#include "zeropage/state_folder.h"

namespace zeropage {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::atomic<int> signal_came{0};
static_assert(std::atomic<int>::is_always_lock_free);

void note_signal(int signal) {
  // Whoever sends SIGTERM starts the run again, whatever else came.
  int none = 0;
  if (signal == SIGTERM) {
    signal_came.store(signal);
  } else {
    signal_came.compare_exchange_strong(none, signal);
  }
}

// The handlers of a process, for all of its savers: ranks that are threads have one each, which end in any order.
class SignalHandlers {
 public:
  void use() {
    const std::lock_guard lock(mutex_);
    if (users_++ > 0) return;
    take(SIGTERM, 0, terminate_before_);
    // So that the second one does what it did before there was a saver.
    take(SIGINT, SA_RESETHAND, interrupt_before_);
  }
  void leave() {
    const std::lock_guard lock(mutex_);
    if (--users_ > 0) return;
    ::sigaction(SIGTERM, &terminate_before_, nullptr);
    ::sigaction(SIGINT, &interrupt_before_, nullptr);
  }

 private:
  static void take(int signal, int flags, struct sigaction& before) {
    ::sigaction(signal, nullptr, &before);
    if (before.sa_handler == SIG_IGN) return;
    struct sigaction action {};
    action.sa_handler = note_signal;
    action.sa_flags = SA_RESTART | flags;
    sigfillset(&action.sa_mask);
    ::sigaction(signal, &action, nullptr);
  }

  std::mutex mutex_;
  int users_ = 0;
  struct sigaction terminate_before_ {};
  struct sigaction interrupt_before_ {};
};

SignalHandlers signal_handlers;

// Memory that the device copies to at its full speed.
at::Tensor host_memory(c10::Device device, int64_t bytes) {
  if (!device.is_cpu()) {
    zero::HostStorage storage(device, device::Machine::here().core_sets(1, {}).front());
    return storage.add(/*page=*/0, bytes, at::kByte, 0, memory::Kind::kStaging);
  }
  const memory::KindScope kind(memory::Kind::kStaging);
  return at::empty({bytes}, at::kByte);
}

}  // namespace

class StateSaver::Saves {
 public:
  Saves(std::filesystem::path folder, const comm::World& world, const StateSaverOptions& options);
  ~Saves();
  Saves(const Saves&) = delete;
  Saves& operator=(const Saves&) = delete;

  double save(const TrainedModule& module, ShardedOptimizer& optimizer, const RunState& run);
  void wait();
  bool is_saving() const { return writes_; }
  const std::optional<SavedReport>& last() const { return last_; }
  int stop_signal() const;

 private:
  class HandledSignals;
  struct InFlight;

  state::Keep keep() const;
  void check_is_newest(int64_t step) const;
  void start(std::unique_ptr<InFlight> in_flight);
  // On the thread.
  void write(InFlight& save) const;

  const std::filesystem::path folder_;
  const comm::World world_;
  const comm::World texts_;
  const StateSaverOptions options_;
  const std::unique_ptr<HandledSignals> signals_;  // null unless on_signal
  // Rank 0's.
  std::unique_ptr<const state::RunToken> token_;
  int64_t step_before_ = 0;  // of the newest state that was there
  std::unique_ptr<saving::StateStaging> staging_;
  std::unique_ptr<InFlight> in_flight_;  // the thread's until it ended
  std::atomic<bool> writes_{false};      // the thread
  std::optional<SavedReport> last_;
  std::thread thread_;  // last: it uses the others
};

class StateSaver::Saves::HandledSignals {
 public:
  HandledSignals() { signal_handlers.use(); }
  ~HandledSignals() { signal_handlers.leave(); }
  HandledSignals(const HandledSignals&) = delete;
  HandledSignals& operator=(const HandledSignals&) = delete;
};

// A save from its copy to its end.
struct StateSaver::Saves::InFlight {
  saving::StatePlan plan;
  std::unique_ptr<saving::SharedSave> shared = nullptr;
  std::vector<saving::StateStaging::Stretch> weights = {};
  std::vector<saving::StateStaging::Stretch> optimizer = {};

  std::exception_ptr error = nullptr;
  SavedReport report = {};
};

StateSaver::Saves::Saves(std::filesystem::path folder, const comm::World& world,
                         const StateSaverOptions& options)
    : folder_(std::move(folder)),
      world_(world),
      texts_(world.beside("saver", options.save.deadline)),
      options_(options),
      signals_(options.on_signal ? std::make_unique<HandledSignals>() : nullptr) {
  ZP_CHECK(options.keep_last >= 0 && options.keep_every >= 0,
           "StateSaverOptions: keep_last and keep_every: expected 0 or more, got ",
           options.keep_last, " and ", options.keep_every);
  ZP_CHECK(
      options.keep_every == 0 || options.keep_last > 0,
      "StateSaverOptions: keep_every without keep_last: all states stay anyway; set keep_last");
  saving::settle(texts_, "taking " + folder_.string(), nullptr, nullptr, [&](auto&) {
    token_ = std::make_unique<const state::RunToken>(folder_);
    step_before_ = state::newest_step_in(folder_).value_or(0);
    return nullptr;
  });
  if (!options.asynchronous) return;
  staging_ = std::make_unique<saving::StateStaging>(
      [device = world.device()](int64_t bytes) { return host_memory(device, bytes); });
}

StateSaver::Saves::~Saves() {
  try {
    wait();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "the last save did not end: %s\n", memory::message_of(error).c_str());
  }
}

int StateSaver::Saves::stop_signal() const {
  static_assert(SIGTERM > SIGINT);
  ZP_CHECK(signals_ != nullptr, "stop_requested() without StateSaverOptions::on_signal");
  const at::Tensor came = world_.communicator().buffer(1, at::kFloat);
  came.fill_(static_cast<double>(signal_came.load()));
  world_.communicator().all_reduce(came, comm::ReduceOp::kMax, "whether to stop").wait();
  return static_cast<int>(came.item<float>());
}

double StateSaver::Saves::save(const TrainedModule& module, ShardedOptimizer& optimizer,
                               const RunState& run) {
  wait();
  const auto begin = Clock::now();
  const ModelRef model = module.with(optimizer);
  ZP_CHECK(world_.size() == model->all_ranks().size(), "StateSaver: the model's state is one of ",
           model->all_ranks().size(), " ranks, but the saver was made over ", world_.size(),
           "; give it DistributedDataParallel::all_ranks(), or the world of an optimizer alone");
  auto in_flight = std::make_unique<InFlight>(
      InFlight{.plan = saving::plan_state(texts_, model, &optimizer, run, options_.save)});
  check_is_newest(in_flight->plan.step);
  in_flight->shared = std::make_unique<saving::SharedSave>(
      texts_, folder_ / state::name_of_step(in_flight->plan.step), token_.get());
  if (staging_ == nullptr) {
    last_ = saving::save_now(*in_flight->shared, in_flight->plan, model, &optimizer, options_.save,
                             keep());
    return seconds_since(begin);
  }
  staging_->clear(static_cast<int64_t>(in_flight->plan.bytes()) / world_.size());
  // Where one rank has no memory for its copy, none saves.
  saving::throw_alike(texts_, "saving state", saving::error_of([&] {
                        saving::StagingSink weights(*staging_);
                        saving::collect_weights(model, in_flight->plan, weights);
                        in_flight->weights = weights.stretches();
                        saving::StagingSink states(*staging_);
                        saving::collect_optimizer(model, optimizer, in_flight->plan, states);
                        in_flight->optimizer = states.stretches();
                      }));
  start(std::move(in_flight));
  return seconds_since(begin);
}

// `latest` would go back, and what keeps the newest states would remove this one.
void StateSaver::Saves::check_is_newest(int64_t step) const {
  saving::throw_alike(texts_, "saving state", saving::error_of([&] {
                        if (step >= step_before_) return;
                        // One that is broken is not what a run would go on from.
                        const int64_t newer = state::newest_valid_step_in(folder_).value_or(0);
                        ZP_CHECK(newer <= step, "StateSaver: expected that ", folder_.string(),
                                 " has no newer state than step ", step, ", got step-", newer,
                                 " of an earlier run; save into a folder of its own, resume from "
                                 "that state, or move newer ones away");
                      }));
}

state::Keep StateSaver::Saves::keep() const {
  return {.last = options_.keep_last, .every = options_.keep_every};
}

void StateSaver::Saves::start(std::unique_ptr<InFlight> in_flight) {
  in_flight_ = std::move(in_flight);
  writes_ = true;
  thread_ = std::thread([this, ledger = memory::Ledger::current()] {
    const memory::LedgerScope on_ledger(ledger);
    state::give_way();
    in_flight_->error = saving::error_of([this] { write(*in_flight_); });
    writes_ = false;
  });
}

void StateSaver::Saves::write(InFlight& save) const {
  const std::filesystem::path folder = save.shared->create(save.plan);
  saving::SharedSave::Pieces pieces;
  const std::exception_ptr error = saving::error_of([&] {
    const bool direct = options_.save.direct_io;
    pieces.weights =
        saving::write_stretches(folder / save.plan.weights.name(), save.weights, direct);
    pieces.optimizer =
        saving::write_stretches(folder / save.plan.optimizer->name(), save.optimizer, direct);
  });
  save.report = save.shared->commit(save.plan, pieces, error, options_.save.update_latest, keep());
}

void StateSaver::Saves::wait() {
  if (!thread_.joinable()) return;
  thread_.join();
  const std::unique_ptr<InFlight> ended = std::move(in_flight_);
  if (ended->error) std::rethrow_exception(ended->error);
  last_ = ended->report;
}

StateSaver::StateSaver(std::filesystem::path folder, const comm::World& world,
                       const StateSaverOptions& options)
    : saves_(std::make_unique<Saves>(std::move(folder), world, options)) {}

StateSaver::~StateSaver() = default;

double StateSaver::save(const TrainedModule& module, ShardedOptimizer& optimizer,
                        const RunState& run) {
  return saves_->save(module, optimizer, run);
}

void StateSaver::wait() {
  saves_->wait();
}

bool StateSaver::is_saving() const {
  return saves_->is_saving();
}

const std::optional<SavedReport>& StateSaver::last() const {
  return saves_->last();
}

int StateSaver::stop_signal() const {
  return saves_->stop_signal();
}

}  // namespace zeropage
