// The store of one generation, in the memory of all simulated processes, and each rank's connection to it.
//
// Threads: any.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tests/simulated/scenario.h"

namespace zeropage::simulated {

// Where a generation meets.
struct Meeting {
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  int generation = 0;
  // The process that serves it; null: the launcher.
  std::shared_ptr<RankLife> server = nullptr;
  // It has let go of the store.
  std::atomic<bool> is_closed{false};

  // All that was ever written, deleted keys among them.
  void note(const std::string& key, const std::vector<uint8_t>& value) {
    const std::lock_guard lock(mutex);
    written[key] = value;
  }
  std::optional<std::vector<uint8_t>> find(const std::string& key) {
    const std::lock_guard lock(mutex);
    const auto found = written.find(key);
    return found == written.end() ? std::nullopt : std::optional(found->second);
  }
  std::mutex mutex;
  std::map<std::string, std::vector<uint8_t>> written;  // guarded by mutex
};

// A rank's connection. It breaks where the rank or the server is dead, and waits where one is held up.
class MeetingStore final : public c10d::Store {
 public:
  struct End {
    std::shared_ptr<Scenario> scenario;
    std::shared_ptr<RankLife> life;
    int rank = 0;
    std::shared_ptr<Meeting> meeting;
    // What a rank with the planted bug reads from; null: it has no bug.
    std::shared_ptr<Meeting> former = nullptr;
    // Goes with the last connection of the rank that serves the store.
    std::shared_ptr<void> service = nullptr;
  };
  explicit MeetingStore(End end) : end_(std::move(end)) {}

  using c10d::Store::compareSet;
  using c10d::Store::set;
  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<MeetingStore>(end_);
  }
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& current,
                                  const std::vector<uint8_t>& next) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<uint8_t>>& values) override;
  bool hasExtendedApi() const override { return true; }

 private:
  // waits: for the server's answer. TCPStore waits for none behind a set, so a server that is held up holds nobody up there.
  c10d::Store& reached(bool waits = true);
  std::vector<uint8_t> read(const std::string& key);

  const End end_;
};

}  // namespace zeropage::simulated
