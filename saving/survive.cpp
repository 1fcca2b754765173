#include "zeropage/survive.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>
#include <new>
#include <optional>
#include <string_view>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "comm/launcher/generations.h"
#include "comm/membership.h"
#include "device/stream.h"
#include "saving/detail/collective_errors.h"
#include "saving/detail/saved_generators.h"
#include "saving/detail/surviving_loop.h"
#include "zero/model_parts.h"
#include "zero/pages/parameter_pages.h"
#include "zeropage/check.h"
#include "zeropage/state_folder.h"

namespace zeropage {
namespace {

constexpr double kNanosecondsOfSecond = 1e9;

std::filesystem::path folder_of(const SurvivalOptions& options) {
  if (!options.folder.empty()) return options.folder;
  const auto given = comm::environment_variable(comm::detail::kCopiesVariable);
  if (!given || given->empty()) return {};
  return std::filesystem::path(*given) / "states";
}

std::vector<Restart> restarts_of(const comm::Membership* membership) {
  std::vector<Restart> restarts;
  if (membership == nullptr) return restarts;
  const std::vector<int> out_of_memory = membership->out_of_memory();
  for (const comm::detail::GenerationBegin& begin : membership->restarts()) {
    // Another rank ended before training went on.
    const bool went_on = begin.resumed_at >= 0;
    const size_t left = restarts.size();
    const int without = left < out_of_memory.size() ? out_of_memory[left] : -1;
    restarts.push_back(
        {.rank = without >= 0 ? without : begin.rank,
         .why = without >= 0 ? c10::str("rank ", without, " ran out of memory") : begin.words(),
         .step = went_on ? begin.resumed_step : 0,
         .seconds = went_on ? static_cast<double>(begin.resumed_at - begin.failed_at) /
                                  kNanosecondsOfSecond
                            : 0});
  }
  return restarts;
}

bool is_out_of_memory(const std::exception& error) {
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
      dynamic_cast<const std::bad_alloc*>(&error) != nullptr) {
    return true;
  }
  // LibTorch's allocators on the host.
  return std::string_view(error.what()).find("you tried to allocate") != std::string_view::npos;
}

// An accelerator that reports an error keeps it until its process ends.
bool device_works(const comm::WorldOptions& options) {
  if (!device::has_streams(options.device)) return true;
  try {
    const c10::impl::VirtualGuardImpl guard(options.device);
    device::Stream::current(guard.getDevice()).record().synchronize();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void say_left(const comm::Place& place, const std::string& why) {
  std::fprintf(stderr, "zeropage: rank %d of %d left its loop: %s\n", place.rank, place.world_size,
               why.c_str());
}

}  // namespace

// On which rung the loop is. All ranks have met behind the agreement, so whoever has run out of memory before has said so. Collective
// where there are rungs.
int memory_rung_of(const comm::World& world, const SurvivalOptions& options,
                   const comm::Membership* membership) {
  if (membership == nullptr || options.memory_rungs == 0) return 0;
  world.check_agreement("survive", {c10::str("memory_rungs ", options.memory_rungs)});
  const std::vector<int> out_of_memory = membership->out_of_memory();
  const auto times =
      std::count_if(out_of_memory.begin(), out_of_memory.end(), [](int rank) { return rank >= 0; });
  const int rung = static_cast<int>(std::min<int64_t>(times, options.memory_rungs));
  if (world.rank() == 0 && !out_of_memory.empty() && out_of_memory.back() >= 0) {
    std::fprintf(stderr,
                 "zeropage: rank %d ran out of memory: the loop goes on on memory rung %d of %d\n",
                 out_of_memory.back(), rung, options.memory_rungs);
  }
  return rung;
}

// What one call of the loop has of copies.
class SurvivingRun::Copies {
 public:
  // membership: null where no rank is started again.
  Copies(const comm::World& world, const SurvivalOptions& options, comm::Membership* membership)
      : world_(world),
        folder_(folder_of(options)),
        copy_every_(options.copy_every),
        membership_(membership),
        memory_rung_(memory_rung_of(world, options, membership)) {}

  bool resume(const TrainedModule& model, ShardedOptimizer& optimizer, RunState& run) {
    ZP_CHECK(!has_resumed_,
             "SurvivingRun::resume: was called before in this call of the loop; "
             "call it once, before the first step");
    bool found = false;
    if (!folder_.empty()) {
      // Before the copy is read: from here on no former start of this run writes any more.
      const SaveOptions save{.deadline = time_for_copy(model.with(optimizer))};
      saver_.emplace(folder_, model.with(optimizer)->all_ranks(),
                     StateSaverOptions{.keep_last = 1, .save = save});
      const nlohmann::json newest =
          saving::settle(world_, "looking for a copy", nullptr, nullptr, [this](const auto&) {
            const auto step = state::newest_valid_step_in(folder_);
            return step ? nlohmann::json(*step) : nlohmann::json();
          });
      found = !newest.is_null();
      // A folder without room is found now, and not after the first steps.
      if (!found) check_can_save(folder_, model, optimizer, save);
      if (found) load_copy(model, optimizer, run);
    }
    ZP_CHECK(found || run.step == 0,
             "SurvivingRun::resume: there is no copy, so the loop begins "
             "anew; expected a RunState of step 0, got step ",
             run.step,
             "; make the RunState inside of the loop, and load a state of your own after resume() "
             "has returned false");
    has_resumed_ = true;
    last_step_ = run.step;
    if (membership_ != nullptr) membership_->note_resume(run.step);
    // All read what rank 0 has noted.
    saving::throw_alike(world_, "going on", nullptr);
    restarts_ = restarts_of(membership_);
    return found;
  }

  void end_step(const TrainedModule& model, ShardedOptimizer& optimizer, const RunState& run) {
    ZP_CHECK(has_resumed_,
             "SurvivingRun::end_step: resume() was not called in this call of the "
             "loop; call it before the first step, or a loop that is called again "
             "begins anew");
    ZP_CHECK(run.step > last_step_, "SurvivingRun::end_step: expected RunState::step above ",
             last_step_, ", which the last call or resume() had, got ", run.step,
             "; count it up after each step");
    last_step_ = run.step;
    if (++steps_ % copy_every_ != 0 || !saver_) return;
    saver_->save(model, optimizer, run);
  }

  void finish() {
    if (saver_) saver_->wait();
  }

  const std::vector<Restart>& restarts() const { return restarts_; }
  int memory_rung() const { return memory_rung_; }

 private:
  // How long ranks wait for the slowest one to write. While one stands still the others leave the loop no sooner.
  std::chrono::milliseconds time_for_copy(const ModelRef& model) const {
    constexpr int64_t kBytesOfElement = 16;           // fp32, two states of Adam, an average
    constexpr int64_t kBytesInMillisecond = 100'000;  // a slow disk
    int64_t elements = 0;
    for (const auto& of : model->parameters()) elements += of.parameter.tensor.numel();
    return world_.deadline() +
           std::chrono::milliseconds(elements * kBytesOfElement / kBytesInMillisecond);
  }
  // A new process has drawn other numbers than one that lived, and both go on with those of the copy.
  void load_copy(const TrainedModule& model, ShardedOptimizer& optimizer, RunState& run) const {
    const saving::SeededAlike generators(world_.device());
    const LoadReport report =
        load_state(folder_, model, optimizer, run,
                   {.fall_back = true, .deadline = time_for_copy(model.with(optimizer))});
    if (!report.random_goes_on) generators.put_back();
    if (world_.rank() != 0) return;
    for (const std::string& note : report.notes) {
      std::fprintf(stderr, "zeropage: %s: %s\n", report.directory.c_str(), note.c_str());
    }
  }

  const comm::World world_;
  const std::filesystem::path folder_;
  const int64_t copy_every_;
  comm::Membership* const membership_;
  const int memory_rung_;
  std::optional<StateSaver> saver_;
  std::vector<Restart> restarts_;
  bool has_resumed_ = false;
  int64_t steps_ = 0;
  int64_t last_step_ = 0;
};

SurvivingRun::SurvivingRun(std::unique_ptr<Copies> copies) : copies_(std::move(copies)) {}

SurvivingRun::~SurvivingRun() = default;

bool SurvivingRun::resume(const TrainedModule& model, ShardedOptimizer& optimizer, RunState& run) {
  return copies_->resume(model, optimizer, run);
}

void SurvivingRun::end_step(const TrainedModule& model, ShardedOptimizer& optimizer,
                            const RunState& run) {
  copies_->end_step(model, optimizer, run);
}

const std::vector<Restart>& SurvivingRun::restarts() const {
  return copies_->restarts();
}

int SurvivingRun::memory_rung() const {
  return copies_->memory_rung();
}

bool ranks_are_restarted() {
  return !comm::environment_variable(comm::detail::kGenerationsVariable).value_or("").empty();
}

void survive(const std::function<void(comm::World&, SurvivingRun&)>& loop,
             const SurvivalOptions& options) {
  static std::atomic_flag was_called;
  ZP_CHECK(!was_called.test_and_set(),
           "survive(): was called before in this process; ranks that are started again would run "
           "the first loop again, so put both into one loop");
  const auto membership = comm::Membership::from_environment();
  saving::SurvivingLoop::run(membership.get(), loop, options);
}

void saving::SurvivingLoop::run(comm::Membership* membership, const Function& loop,
                                const SurvivalOptions& options) {
  ZP_CHECK(options.copy_every > 0, "SurvivalOptions::copy_every: expected 1 or more, got ",
           options.copy_every);
  ZP_CHECK(options.memory_rungs >= 0, "SurvivalOptions::memory_rungs: expected 0 or more, got ",
           options.memory_rungs);
  for (;;) {
    std::exception_ptr error;
    bool out_of_memory = false;
    std::string words = "an exception that is no std::exception";
    try {
      comm::World world = membership ? membership->join(options.world)
                                     : comm::World::from_environment(options.world);
      SurvivingRun run(std::make_unique<SurvivingRun::Copies>(world, options, membership));
      loop(world, run);
      run.copies_->finish();
      // Whoever has returned can go back as long as another one may fail.
      saving::throw_alike(world, "the end of the loop", nullptr);
      if (membership) membership->finish();
      return;
    } catch (const std::exception& thrown) {
      error = std::current_exception();
      words = memory::message_of(thrown);
      out_of_memory = is_out_of_memory(thrown);
    } catch (...) {
      error = std::current_exception();
    }
    if (!membership || !device_works(options.world)) std::rethrow_exception(error);
    say_left(membership->place(), words);
    if (membership->world_lives()) {
      // The launcher starts this process again.
      std::fprintf(stderr,
                   "zeropage: what the loop made lives on behind it, such as a model, an optimizer "
                   "or a World in a variable outside of the loop, so this process ends; let the "
                   "loop own all of it\n");
      std::rethrow_exception(error);
    }
    if (!membership->leave(words, out_of_memory)) std::rethrow_exception(error);
  }
}

}  // namespace zeropage
