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
  return std::make_unique<Membership>(read_place(), detail::Generations::open(*path));
}

Membership::Membership(Place place, detail::Generations generations)
    : place_(std::move(place)),
      generations_(std::make_shared<detail::Generations>(std::move(generations))) {
  if (place_.world_size == 1) return;
  memory::Ledger::process()->set_owner(c10::str("rank ", place_.rank, "/", place_.world_size));
  detail::say_uncaught_errors_shortly();
}

World Membership::join(const WorldOptions& options) {
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
  place.gone = [generations = generations_, generation = joined_] {
    if (generations->current() == generation) return std::vector<int>();
    return std::vector<int>{generations->begin_of(generation + 1).rank};
  };
  World world(place, open_store(place, options.deadline), options);
  met_ = world.state_;
  return world;
}

bool Membership::leave(const std::string& words) {
  generations_->leave(place_.rank, joined_, detail::accused_in(words, place_.rank).value_or(-1));
  while (generations_->current() == joined_) {
    if (generations_->is_closed()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

void Membership::note_resume(int64_t step) {
  if (place_.rank == 0) generations_->note_resume(joined_, step);
}

void Membership::finish() {
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
