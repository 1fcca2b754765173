#include "tests/simulated/cluster.h"

#include <csignal>
#include <map>
#include <mutex>
#include <thread>

#include <ATen/Parallel.h>

#include "comm/launcher/rank_restarts.h"
#include "saving/detail/surviving_loop.h"
#include "tests/simulated/counted_communicator.h"
#include "tests/simulated/meeting.h"
#include "tests/simulated/training.h"
#include "zeropage/check.h"

namespace zeropage::simulated {
namespace {

using Clock = std::chrono::steady_clock;
using comm::detail::RankEnd;
using std::chrono::milliseconds;

constexpr milliseconds kLook{3};
// Much longer than all that a run waits for.
constexpr std::chrono::seconds kLongestRun{60};
constexpr const char* kCopiesPrefix = "/zeropage-copies-";

std::mutex disks_mutex;
// By the launcher's folder for copies.
std::map<std::string, std::shared_ptr<Scenario>> disks;

std::string folder_of_copies(const std::string& path) {
  const size_t at = path.find(kCopiesPrefix);
  return at == std::string::npos ? "" : path.substr(0, path.find('/', at + 1));
}

// The simulated process of a rank.
struct Process {
  std::thread thread;
  std::shared_ptr<RankLife> life;
  std::atomic<bool> has_ended{false};
  // Written before has_ended.
  RankEnd end;
  Outcome::OfRank outcome;
};

class Cluster {
 public:
  explicit Cluster(const RunPlan& plan)
      : plan_(plan),
        scenario_(std::make_shared<Scenario>(plan)),
        restarts_(
            comm::LaunchOptions{
                .ranks = plan.training.ranks, .grace = kGrace, .restarts = plan.restarts},
            /*port=*/0, [this](const std::string& text) { begins_.push_back(text); }),
        processes_(static_cast<size_t>(plan.training.ranks)) {
    comm::detail::RankEnvironment environment;
    restarts_.complete(environment);
    generations_path_ = environment.generations;
    copies_ = environment.copies;
    const std::lock_guard lock(disks_mutex);
    disks[copies_.string()] = scenario_;
  }
  ~Cluster() {
    const std::lock_guard lock(disks_mutex);
    disks.erase(copies_.string());
  }
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  Outcome run();

 private:
  void start(int rank);
  void be_rank(int rank, Process& process, const std::shared_ptr<memory::Ledger>& ledger);
  c10::intrusive_ptr<c10d::Store> open_store(const comm::Place& place, const Process& process);
  std::shared_ptr<Meeting> meeting_of(int generation);
  void look_after_ends();
  bool all_have_ended() const;
  void kill_all();

  const RunPlan plan_;
  const std::shared_ptr<Scenario> scenario_;
  std::vector<std::string> begins_;
  comm::detail::RankRestarts restarts_;
  std::string generations_path_;
  std::filesystem::path copies_;
  std::vector<std::unique_ptr<Process>> processes_;  // by rank
  // When a run that has failed for good kills who is left.
  std::optional<Clock::time_point> kill_at_;
  std::mutex meetings_mutex_;
  std::map<int, std::shared_ptr<Meeting>> meetings_;  // by generation
};

std::shared_ptr<Meeting> Cluster::meeting_of(int generation) {
  const std::lock_guard lock(meetings_mutex_);
  std::shared_ptr<Meeting>& meeting = meetings_[generation];
  if (!meeting) meeting = std::make_shared<Meeting>();
  meeting->generation = generation;
  return meeting;
}

c10::intrusive_ptr<c10d::Store> Cluster::open_store(const comm::Place& place,
                                                    const Process& process) {
  const int generation = std::stoi(place.attempt.substr(place.attempt.rfind('.') + 1));
  scenario_->begin_generation(place.rank, generation);
  const auto meeting = meeting_of(generation);
  MeetingStore::End end{
      .scenario = scenario_, .life = process.life, .rank = place.rank, .meeting = meeting};
  if (plan_.reads_former_generation && generation > 0 && place.rank == plan_.training.ranks - 1) {
    end.former = meeting_of(generation - 1);
  }
  if (place.rank == 0 && !plan_.launcher_serves_store) {
    const std::lock_guard lock(meetings_mutex_);
    meeting->server = process.life;
    end.service = std::shared_ptr<void>(nullptr, [meeting](void*) { meeting->is_closed = true; });
  }
  auto store = c10::make_intrusive<MeetingStore>(std::move(end));
  store->setTimeout(4 * kDeadline);
  return store;
}

void Cluster::be_rank(int rank, Process& process, const std::shared_ptr<memory::Ledger>& ledger) {
  const memory::LedgerScope on_ledger(ledger);
  at::set_num_threads(1);
  const int ranks = plan_.training.ranks;
  const comm::Place place{.rank = rank,
                          .world_size = ranks,
                          .local_rank = rank,
                          .local_world_size = ranks,
                          .host = "simulated",
                          .launcher_serves_store = plan_.launcher_serves_store,
                          .launcher = "simulated cluster"};
  const std::filesystem::path states = copies_ / "states";
  const SurvivalOptions options{
      .copy_every = plan_.copy_every,
      .folder = states,
      .world = {.deadline = kDeadline,
                .busy_limit = 2 * kDeadline,
                .transport = plan_.over_sockets ? comm::Transport::kGloo : comm::Transport::kShared,
                .decorate = [this](std::unique_ptr<comm::Communicator> inner) {
                  return std::make_unique<CountedCommunicator>(std::move(inner), scenario_);
                }}};
  const Hooks hooks{.resumes = [&] { scenario_->begin_phase(rank, Scenario::Phase::kLoads); },
                    .resumed =
                        [&](int64_t step) {
                          scenario_->begin_phase(rank, Scenario::Phase::kTrains);
                          scenario_->note_resume(rank, step);
                        },
                    .before_step = [&](int64_t step) { scenario_->at_step(rank, step, states); },
                    .after_step = [&](int64_t step) { scenario_->note_step(rank, step); }};
  try {
    comm::Membership membership(
        place, comm::detail::Generations::open(generations_path_),
        {.open_store = [&](const comm::Place& at, milliseconds) { return open_store(at, process); },
         .before_word = [&] { process.life->pass_or_throw(); }});
    std::optional<Ending> ending;
    saving::SurvivingLoop::run(
        &membership,
        [&](comm::World& world, SurvivingRun& run) {
          ending = train(world, &run, plan_.training, plan_.steps, hooks);
        },
        options);
    process.outcome.ending = ending;
  } catch (const Killed&) {
    process.end.signal = SIGKILL;
    process.outcome.was_killed = true;
  } catch (const std::exception& error) {
    process.end.exit_code = 1;
    process.outcome.error = memory::message_of(error);
  }
}

void Cluster::start(int rank) {
  std::unique_ptr<Process>& process = processes_[static_cast<size_t>(rank)];
  process = std::make_unique<Process>();
  process->life = std::make_shared<RankLife>();
  const auto ledger = std::make_shared<memory::Ledger>("rank " + std::to_string(rank));
  scenario_->start(rank, process->life, ledger);
  process->thread = std::thread([this, rank, ledger, own = process.get()] {
    be_rank(rank, *own, ledger);
    own->has_ended = true;
  });
}

// What RankSupervisor does with processes that end.
void Cluster::look_after_ends() {
  for (size_t rank = 0; rank < processes_.size(); ++rank) {
    Process& process = *processes_[rank];
    if (!process.thread.joinable() || !process.has_ended) continue;
    process.thread.join();
    if (!kill_at_ && restarts_.takes(static_cast<int>(rank), process.end)) {
      start(static_cast<int>(rank));
    } else if (!kill_at_ && process.end.failed()) {
      restarts_.close();
      kill_at_ = Clock::now() + 4 * kDeadline;
    }
  }
}

bool Cluster::all_have_ended() const {
  for (const auto& process : processes_) {
    if (process->thread.joinable()) return false;
  }
  return true;
}

void Cluster::kill_all() {
  for (const auto& process : processes_) process->life->kill();
}

Outcome Cluster::run() {
  const auto begin = Clock::now();
  Outcome outcome;
  for (int rank = 0; rank < plan_.training.ranks; ++rank) start(rank);
  while (!all_have_ended() && outcome.hung.empty()) {
    std::this_thread::sleep_for(kLook);
    look_after_ends();
    if (!kill_at_) {
      for (const int late : restarts_.look()) processes_[static_cast<size_t>(late)]->life->kill();
    } else if (Clock::now() > *kill_at_) {
      kill_all();
    }
    if (Clock::now() < begin + kLongestRun) continue;
    for (size_t rank = 0; rank < processes_.size(); ++rank) {
      if (processes_[rank]->thread.joinable()) outcome.hung.push_back(static_cast<int>(rank));
    }
  }
  for (const auto& process : processes_) {
    if (!process->thread.joinable()) outcome.ranks.push_back(process->outcome);
  }
  outcome.happened = scenario_->happened();
  outcome.begins = begins_;
  outcome.generations = static_cast<int>(begins_.size());
  outcome.lost_steps = scenario_->lost_steps();
  outcome.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return outcome;
}

}  // namespace

Outcome run_on_cluster(const RunPlan& plan) {
  auto cluster = std::make_unique<Cluster>(plan);
  Outcome outcome = cluster->run();
  // Threads that hang use it.
  if (!outcome.hung.empty()) static_cast<void>(cluster.release());
  return outcome;
}

void simulate_disks() {
  testing::judge_calls(kCopiesPrefix, [](const std::string& call, const std::string& path) {
    std::shared_ptr<Scenario> scenario;
    {
      const std::lock_guard lock(disks_mutex);
      const auto found = disks.find(folder_of_copies(path));
      if (found != disks.end()) scenario = found->second;
    }
    return scenario ? scenario->at_file(call, path) : testing::FaultOfCall{};
  });
}

}  // namespace zeropage::simulated
