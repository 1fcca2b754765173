#include "zeropage/data/prefetching_loader.h"

#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include <ATen/core/grad_mode.h>

#include "zeropage/check.h"
#include "zeropage/ledger.h"

namespace zeropage::data {

class PrefetchingLoader::Queue {
 public:
  Queue(DistributedSampler sampler, Load load, const LoaderOptions& options)
      : options_(options),
        load_(std::move(load)),
        ledger_(memory::Ledger::current()),
        given_(sampler),
        ahead_(std::move(sampler)) {
    ZP_CHECK(options.threads >= 0, "PrefetchingLoader: expected 0 threads or more, got ",
             options.threads);
    ZP_CHECK(options.ahead >= 1, "PrefetchingLoader: expected at least 1 batch ahead, got ",
             options.ahead);
    for (int i = 0; i < options.threads; ++i) threads_.emplace_back([this] { work(); });
  }

  ~Queue() {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    room_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // The caller's sampler moves, and what was made ahead is of no use any more.
  template <typename Move>
  void move(const Move& move_sampler) {
    const std::lock_guard lock(mutex_);
    move_sampler(given_);
    ahead_ = given_;
    ++generation_;
    next_given_ = next_taken_ = 0;
    is_exhausted_ = false;
    made_.clear();
    room_.notify_all();
  }

  std::optional<Batch> next() {
    const auto expected = DistributedSampler(given_).next();  // throws after the epoch's end
    if (!expected) {
      given_.next();
      return std::nullopt;
    }
    Batch batch = threads_.empty() ? make(*expected, given_.epoch()) : take();
    given_.next();
    return batch;
  }

  const DistributedSampler& given() const { return given_; }

 private:
  struct Made {
    std::optional<Batch> batch;
    std::exception_ptr error;
  };

  Batch make(const std::vector<int64_t>& samples, int64_t epoch) const {
    const at::NoGradGuard no_grad;
    return load_(samples, epoch);
  }

  // The batch of number next_given_.
  Batch take() {
    std::unique_lock lock(mutex_);
    ready_.wait(lock, [&] { return made_.contains(next_given_); });
    const auto found = made_.find(next_given_);
    if (found->second.error) std::rethrow_exception(found->second.error);
    Batch batch = std::move(*found->second.batch);
    made_.erase(found);
    ++next_given_;
    room_.notify_all();
    return batch;
  }

  void work() {
    const memory::LedgerScope scope(ledger_);
    std::unique_lock lock(mutex_);
    while (true) {
      room_.wait(lock, [&] {
        return ends_ || (!is_exhausted_ && next_taken_ - next_given_ < options_.ahead);
      });
      if (ends_) return;
      const auto samples = ahead_.next();
      if (!samples) {
        is_exhausted_ = true;
        continue;
      }
      const int64_t number = next_taken_++, generation = generation_, epoch = ahead_.epoch();
      lock.unlock();
      Made made;
      try {
        made.batch = make(*samples, epoch);
      } catch (...) {
        made.error = std::current_exception();
      }
      lock.lock();
      if (generation != generation_) continue;
      made_.emplace(number, std::move(made));
      ready_.notify_all();
    }
  }

  const LoaderOptions options_;
  const Load load_;
  const std::shared_ptr<memory::Ledger> ledger_;
  std::vector<std::thread> threads_;

  DistributedSampler given_;  // the caller's: after what next() has returned

  std::mutex mutex_;
  std::condition_variable room_, ready_;
  // Guarded by mutex_.
  DistributedSampler ahead_;  // after what threads have taken
  int64_t generation_ = 0;    // of moves of the sampler
  int64_t next_given_ = 0;    // batches are numbered within a generation
  int64_t next_taken_ = 0;
  bool is_exhausted_ = false;
  bool ends_ = false;
  std::map<int64_t, Made> made_;
};

PrefetchingLoader::PrefetchingLoader(DistributedSampler sampler, Load load,
                                     const LoaderOptions& options)
    : queue_(std::make_unique<Queue>(std::move(sampler), std::move(load), options)) {}

PrefetchingLoader::~PrefetchingLoader() = default;

void PrefetchingLoader::set_epoch(int64_t epoch) {
  if (epoch == this->epoch()) return;
  queue_->move([&](DistributedSampler& sampler) { sampler.set_epoch(epoch); });
}

void PrefetchingLoader::restart() {
  queue_->move([](DistributedSampler& sampler) { sampler.restart(); });
}

std::optional<PrefetchingLoader::Batch> PrefetchingLoader::next() {
  return queue_->next();
}

int64_t PrefetchingLoader::epoch() const {
  return queue_->given().epoch();
}
int64_t PrefetchingLoader::position() const {
  return queue_->given().position();
}
int64_t PrefetchingLoader::batches() const {
  return queue_->given().batches();
}

void PrefetchingLoader::save(torch::serialize::OutputArchive& archive) const {
  queue_->given().save(archive);
}

void PrefetchingLoader::load(torch::serialize::InputArchive& archive) {
  queue_->move([&](DistributedSampler& sampler) { sampler.load(archive); });
}

}  // namespace zeropage::data
