#include "tests/simulated/meeting.h"

#include <thread>

#include <c10/util/Exception.h>

namespace zeropage::simulated {
namespace {

constexpr std::chrono::milliseconds kBetweenLooks{1};

}  // namespace

// The store, where messages go there and come back.
c10d::Store& MeetingStore::reached(bool waits) {
  const bool is_alive = end_.scenario->at_store_call(end_.rank, end_.life) && !end_.life->is_dead();
  const auto& server = end_.meeting->server;
  const bool is_served =
      !end_.meeting->is_closed && (!server || (waits ? server->pass() : !server->is_dead()));
  if (!is_alive || !is_served) {
    C10_THROW_ERROR(DistNetworkError, "the connection to the store has been closed (simulated)");
  }
  return *end_.meeting->store;
}

void MeetingStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  reached(/*waits=*/false).set(key, value);
  end_.meeting->note(key, value);
}

std::vector<uint8_t> MeetingStore::compareSet(const std::string& key,
                                              const std::vector<uint8_t>& current,
                                              const std::vector<uint8_t>& next) {
  return reached().compareSet(key, current, next);
}

// The planted bug: a key without its generation has what the former one left there.
std::vector<uint8_t> MeetingStore::read(const std::string& key) {
  c10d::Store& store = reached();
  const std::string own = "." + std::to_string(end_.meeting->generation) + "/";
  const size_t at = key.find(own);
  // Behind the meeting: what it reads there of memory and sockets has gone with the former generation.
  const bool has_met = end_.scenario->phase_of(end_.rank) != Scenario::Phase::kMeets;
  if (end_.former && has_met && at != std::string::npos) {
    std::string stale = key;
    stale.replace(at, own.size(), "." + std::to_string(end_.former->generation) + "/");
    if (const auto value = end_.former->find(stale)) return *value;
  }
  return store.get(key);
}

std::vector<uint8_t> MeetingStore::get(const std::string& key) {
  wait({key}, timeout_);
  return read(key);
}

int64_t MeetingStore::add(const std::string& key, int64_t value) {
  return reached().add(key, value);
}

bool MeetingStore::deleteKey(const std::string& key) {
  return reached().deleteKey(key);
}

bool MeetingStore::check(const std::vector<std::string>& keys) {
  return reached().check(keys);
}

int64_t MeetingStore::getNumKeys() {
  return reached().getNumKeys();
}

void MeetingStore::wait(const std::vector<std::string>& keys) {
  wait(keys, timeout_);
}

void MeetingStore::wait(const std::vector<std::string>& keys,
                        const std::chrono::milliseconds& timeout) {
  const auto give_up_at = std::chrono::steady_clock::now() + timeout;
  while (!check(keys)) {
    if (std::chrono::steady_clock::now() >= give_up_at) {
      C10_THROW_ERROR(DistStoreError, "wait timeout for " + keys.front() + " (simulated)");
    }
    std::this_thread::sleep_for(kBetweenLooks);
  }
}

void MeetingStore::append(const std::string& key, const std::vector<uint8_t>& value) {
  reached(/*waits=*/false).append(key, value);
}

std::vector<std::vector<uint8_t>> MeetingStore::multiGet(const std::vector<std::string>& keys) {
  wait(keys, timeout_);
  std::vector<std::vector<uint8_t>> values;
  for (const std::string& key : keys) values.push_back(read(key));
  return values;
}

void MeetingStore::multiSet(const std::vector<std::string>& keys,
                            const std::vector<std::vector<uint8_t>>& values) {
  for (size_t index = 0; index < keys.size(); ++index) set(keys[index], values[index]);
}

}  // namespace zeropage::simulated
