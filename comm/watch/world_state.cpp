#include "comm/watch/world_state.h"

#include <algorithm>
#include <exception>

#include "comm/watch/rank_failure.h"

namespace zeropage::comm::detail {

WorldState::~WorldState() {
  // A rank that fails waits for no other.
  if (communicator && std::uncaught_exceptions() == 0) {
    if (watch) watch->begin_leave();
    communicator->finish();
  } else if (watch) {
    tell_of_shortage(*watch, names[place.rank]);
  }
  if (!texts) return;
  // Where something failed here the others fail too, and one that is lost reads nothing any more.
  const auto& looks = beside ? beside->watch : watch;
  if (std::uncaught_exceptions() > 0 || !looks->activity().leave_status()) return;
  try {
    texts->wait_for_readers();
  } catch (const std::exception&) {
    // No thread could be started to ask with: the others may name this rank as lost.
  }
}

std::vector<int> WorldState::lost_ranks() const {
  if (const auto& gone = root().place.gone) {
    if (std::vector<int> known = gone(); !known.empty()) return known;
  }
  Communicator* const watched = beside ? beside->communicator.get() : communicator.get();
  std::vector<int> lost = watched != nullptr ? watched->lost_ranks() : std::vector<int>();
  if (lost.empty()) return lost;
  if (texts->has_lost_store()) return {store_server_name()};
  // While the store is served its rank is only about to end, because of another.
  if (lost.size() > 1) std::erase(lost, store_server());
  return names.of(lost);
}

void WorldState::begin_texts() {
  std::function<bool()> has_ended;
  if (const auto& gone = root().place.gone) {
    has_ended = [gone] { return !gone().empty(); };
  }
  texts = std::make_unique<TextRounds>(
      TextRounds::Options{.store = store,
                          .rank = place.rank,
                          .size = place.world_size,
                          .store_server = store_server(),
                          .store_server_name = store_server_name(),
                          .names = names,
                          .fails_kin = beside == nullptr,
                          .where = where,
                          .deadline = deadline,
                          .watch = beside ? beside->watch : watch,
                          .lost_ranks = [this] { return lost_ranks(); },
                          .has_ended = has_ended});
}

}  // namespace zeropage::comm::detail
