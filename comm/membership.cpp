#include "comm/membership.h"

#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "comm/launcher/rank_output.h"
#include "comm/uncaught_error.h"
#include "zeropage/ledger.h"

namespace zeropage::comm {

std::unique_ptr<Membership> Membership::from_environment() {
  const auto path = environment_variable(detail::kGenerationsVariable);
  if (!path || path->empty()) return nullptr;
  auto membership = std::make_unique<Membership>(read_place(), detail::Generations::open(*path));
  const Place& place = membership->place();
  if (place.world_size == 1) return membership;
  memory::Ledger::process()->set_owner(c10::str("rank ", place.rank, "/", place.world_size));
  detail::say_uncaught_errors_shortly();
  return membership;
}

Membership::Membership(Place place, detail::Generations generations, Surroundings surroundings)
    : place_(std::move(place)),
      surroundings_(std::move(surroundings)),
      generations_(std::make_shared<detail::Generations>(std::move(generations))) {}

void Membership::before_word() const {
  if (surroundings_.before_word) surroundings_.before_word();
}

World Membership::join(const WorldOptions& options) {
  before_word();
  joined_ = generations_->current();
  generations_->join(place_.rank, joined_);
  Place place = place_;
  place.attempt = c10::str(place_.attempt, ".", joined_);
  // The socket of the first start is at its port.
  if (joined_ > 0) place.store_socket = -1;
  place.master_port = static_cast<uint16_t>(generations_->begin_of(joined_).port);
  if (!place.rendezvous_file.empty() && joined_ > 0) {
    place.rendezvous_file += c10::str(".", joined_);
  }
  place.gone = [generations = generations_, generation = joined_,
                before_word = surroundings_.before_word] {
    if (before_word) before_word();
    if (generations->current() == generation) return std::vector<int>();
    return std::vector<int>{generations->begin_of(generation + 1).rank};
  };
  World world(place, surroundings_.open_store(place, options.deadline), options);
  met_ = world.state_;
  return world;
}

bool Membership::leave(const std::string& words, bool out_of_memory) {
  before_word();
  const int blamed = detail::accused_in(words, place_.rank).value_or(-1);
  // Whoever waits for a rank that ran out of memory ends with its words.
  if (out_of_memory && blamed < 0) generations_->note_out_of_memory(place_.rank, joined_);
  generations_->leave(place_.rank, joined_, blamed);
  while (generations_->current() == joined_) {
    before_word();
    if (generations_->is_closed()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

std::vector<int> Membership::out_of_memory() const {
  std::vector<int> ranks;
  for (int generation = 0; generation < joined_; ++generation) {
    ranks.push_back(generations_->out_of_memory(generation));
  }
  return ranks;
}

void Membership::note_resume(int64_t step) {
  before_word();
  if (place_.rank == 0) generations_->note_resume(joined_, step);
}

void Membership::finish() {
  before_word();
  generations_->finish(place_.rank);
}

std::vector<detail::GenerationBegin> Membership::restarts() const {
  std::vector<detail::GenerationBegin> begins;
  for (int generation = 1; generation <= generations_->current(); ++generation) {
    begins.push_back(generations_->begin_of(generation));
  }
  return begins;
}

}  // namespace zeropage::comm
