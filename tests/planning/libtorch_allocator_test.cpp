// The model of LibTorch's CUDA caching allocator beside that allocator, which runs over a stand-in for CUDA's runtime:
// the same requests, and after each of them the same bytes reserved and in use.
#include <ostream>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>
#include <gtest/gtest.h>

#include "planning/caching_allocator.h"
#include "tests/harness/allocator_on_host/cuda_runtime_stand_in.h"

namespace zeropage::libtorch_allocator_test {
namespace {

namespace libtorch = c10::cuda::CUDACachingAllocator;
using planning::CachingAllocator;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int kStreams = 3;

void begin_libtorch() {
  static const bool begun = [] {
    libtorch::init(/*device_count=*/1);
    return true;
  }();
  static_cast<void>(begun);
}

int64_t current(const c10::CachingAllocator::StatArray& stat) {
  return stat[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)].current;
}

// Both, with the same requests. Leaves LibTorch's with nothing.
class Both {
 public:
  explicit Both(const CachingAllocator::Options& options) : model_(options) {
    begin_libtorch();
    libtorch::setAllocatorSettings(options.expandable_segments ? "expandable_segments:True"
                                                               : "expandable_segments:False");
    const auto limit = static_cast<double>(options.limit_bytes);
    libtorch::setMemoryFraction(
        limit == 0 ? 1.0 : limit / static_cast<double>(testing::kBytesOfStandIn), 0);
  }
  ~Both() {
    for (const auto& [block, places] : live_) libtorch::raw_delete(places.of_libtorch);
    libtorch::emptyCache();
  }
  Both(const Both&) = delete;
  Both& operator=(const Both&) = delete;

  // Whether there was room.
  bool allocate(int64_t block, int64_t bytes, int stream) {
    // A number that is a stream to nobody but the allocator.
    auto* const of_libtorch = reinterpret_cast<cudaStream_t>(uintptr_t{0x100} * (stream + 1));
    void* data = nullptr;
    try {
      data = libtorch::get()->raw_alloc_with_stream(static_cast<size_t>(bytes), of_libtorch);
    } catch (const c10::OutOfMemoryError&) {
    }
    const auto address = model_.allocate(bytes, stream);
    EXPECT_EQ(address.has_value(), data != nullptr) << bytes << " bytes";
    if (data != nullptr && address) live_[block] = {data, *address};
    return data != nullptr;
  }
  void free(int64_t block) {
    const Places places = live_.at(block);
    libtorch::raw_delete(places.of_libtorch);
    model_.free(places.of_model);
    live_.erase(block);
  }
  void release_cached() {
    libtorch::emptyCache();
    model_.release_cached();
  }
  // Returns whether they agree.
  bool agree() const {
    const auto stats = libtorch::getDeviceStats(0);
    return current(stats.reserved_bytes) == model_.reserved_bytes() &&
           current(stats.allocated_bytes) == model_.used_bytes();
  }
  const CachingAllocator& model() const { return model_; }

 private:
  struct Places {
    void* of_libtorch;
    CachingAllocator::Address of_model;
  };

  CachingAllocator model_;
  std::unordered_map<int64_t, Places> live_;
};

// Small, between the two pools, of the large pool's shared segments, powers of two, and segments of their own.
int64_t some_bytes(std::mt19937_64& random) {
  const auto below = [&](int64_t bytes) {
    return 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(bytes));
  };
  switch (random() % 8) {
    case 0:
    case 1:
      return below(2 << 10);
    case 2:
    case 3:
      return below(5 * kMiB / 4);
    case 4:
    case 5:
      return below(12 * kMiB);
    case 6:
      return int64_t{512} << random() % 17;
    default:
      return below(90 * kMiB);
  }
}

struct Case {
  CachingAllocator::Options options;
  uint64_t seed = 0;
};

std::string name_of(const Case& tested) {
  const CachingAllocator::Options& options = tested.options;
  return std::string(options.expandable_segments ? "Expandable" : "Fixed") +
         (options.limit_bytes == 0 ? "" : "BelowALimit") + std::to_string(tested.seed);
}
void PrintTo(const Case& tested, std::ostream* out) {
  *out << name_of(tested);
}

class LibtorchAllocatorTest : public ::testing::TestWithParam<Case> {};

TEST_P(LibtorchAllocatorTest, ReservesWhatTheModelSaysAfterEachOf4000Requests) {
  const auto& [options, seed] = GetParam();
  constexpr int kRequests = 4000;
  constexpr size_t kMostLive = 150;
  Both both(options);
  std::mt19937_64 random(seed);
  std::vector<int64_t> live;
  const auto free_one = [&] {
    const size_t chosen = random() % live.size();
    both.free(live[chosen]);
    live[chosen] = live.back();
    live.pop_back();
  };
  int refused = 0;
  for (int64_t request = 0; request < kRequests; ++request) {
    if (random() % 1000 == 0) {
      both.release_cached();
    } else if (live.empty() || random() % 100 < 52) {
      const int stream = random() % 4 == 0 ? 1 + static_cast<int>(random() % (kStreams - 1)) : 0;
      if (both.allocate(request, some_bytes(random), stream)) {
        live.push_back(request);
      } else {
        ++refused;
      }
    } else {
      free_one();
    }
    // The end of a step frees nearly all.
    while (live.size() > kMostLive && random() % 200 != 0) free_one();
    ASSERT_TRUE(both.agree()) << "after request " << request;
  }
  EXPECT_EQ(refused > 0, options.limit_bytes != 0) << refused;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const bool expandable : {false, true}) {
    for (const int64_t limit_bytes : {int64_t{0}, 640 * kMiB}) {
      for (const uint64_t seed : {1, 2, 3}) {
        all.push_back({{.expandable_segments = expandable, .limit_bytes = limit_bytes}, seed});
      }
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Segments, LibtorchAllocatorTest, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace zeropage::libtorch_allocator_test
