#include "device/pinned_arena.h"

#include <sys/mman.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "device/host_memory.h"
#include "device/page_nodes.h"
#include "tests/harness/errors.h"
#include "zeropage/bytes.h"
#include "zeropage/ledger.h"
#include "zeropage/testing.h"

namespace zeropage::device::pinned_arena_test {
namespace {

using memory::operator""_MiB;

using testing::error_of;
using ::testing::HasSubstr;

#ifdef __SANITIZE_THREAD__
constexpr bool kHasShadow = true;
#else
constexpr bool kHasShadow = false;
#endif

// The system may refuse to tell; then it says so.
void expect_on_own_nodes(const void* data, int64_t bytes) {
  std::vector<int> nodes;
  for (const Core& core : Machine::here().cores()) nodes.push_back(core.node);
  try {
    for (const auto& [node, there] : bytes_by_node(data, bytes)) {
      EXPECT_THAT(nodes, ::testing::Contains(node)) << there << " bytes";
    }
  } catch (const std::system_error& error) {
    EXPECT_THAT(error.what(), HasSubstr("move_pages"));
  }
}

TEST(PinnedArenaTest, HoldsExactlyWhatWasComputedForItsTakes) {
  const std::vector<Take> takes{
      {1000, at::kFloat}, {7, at::kBFloat16}, {0, at::kFloat}, {33, at::kByte}};
  EXPECT_EQ(PinnedArena::bytes_for(takes), 4032 + 64 + 0 + 64);
  PinnedArena arena(PinnedArena::bytes_for(takes));
  int64_t filled = 0;
  std::vector<at::Tensor> tensors;
  for (const Take& take : takes) {
    const at::Tensor tensor = arena.take(take.numel, take.dtype);
    EXPECT_EQ(tensor.sizes(), at::IntArrayRef({take.numel}));
    EXPECT_EQ(tensor.scalar_type(), take.dtype);
    EXPECT_TRUE(tensor.is_cpu());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 64, 0U);
    EXPECT_EQ(tensor.count_nonzero().item<int64_t>(), 0);
    tensor.fill_(++filled);
    tensors.push_back(tensor);
  }
  for (int64_t index = 0; index < filled; ++index) {
    const at::Tensor& tensor = tensors[static_cast<size_t>(index)];
    EXPECT_TRUE((tensor == index + 1).all().item<bool>()) << "another take overlaps " << index;
  }
  EXPECT_EQ(arena.taken_bytes(), arena.bytes());
  EXPECT_EQ(error_of([&] { arena.take(5, at::kFloat); }),
            "PinnedArena: exhausted: of 4.1 KiB are 4.1 KiB taken, and 64 B asked for (5 of "
            "Float); make it of bytes_for all that will be taken");
}

TEST(PinnedArenaTest, MapsNoPageMoreAndFirstTouchesAll) {
  if (kHasShadow) GTEST_SKIP() << "ThreadSanitizer's shadow of the arena is resident too";
  constexpr int64_t kBytes = 40_MiB + 4096;  // a power of two would be 64 MiB
  for (const HugePages huge_pages : {HugePages::kAsk, HugePages::kNone}) {
    for (const CoreSet& cores : {CoreSet{}, Machine::here().cores()}) {
      const int64_t before = memory::resident_bytes();
      PinnedArena arena(kBytes, {.cores = cores, .huge_pages = huge_pages});
      const at::Tensor all = arena.take(kBytes, at::kByte);
      EXPECT_NEAR(static_cast<double>(memory::resident_bytes() - before), kBytes, 2_MiB);
      expect_on_own_nodes(all.data_ptr(), kBytes);
    }
  }
}

TEST(PinnedArenaTest, LivesAsLongAsATensorOfItAndNoLonger) {
  if (kHasShadow) GTEST_SKIP() << "ThreadSanitizer's shadow of the arena is resident too";
  constexpr int64_t kBytes = 32_MiB;
  const int64_t before = memory::resident_bytes();
  at::Tensor tensor;
  {
    PinnedArena arena(kBytes);
    tensor = arena.take(kBytes / 8, at::kFloat);
    arena.take(16, at::kFloat);
  }
  tensor.fill_(3);
  EXPECT_EQ(tensor.view({-1})[-1].item<float>(), 3);
  EXPECT_NEAR(static_cast<double>(memory::resident_bytes() - before), kBytes, 2_MiB);
  tensor.reset();
  EXPECT_NEAR(static_cast<double>(memory::resident_bytes() - before), 0, 2_MiB);
}

TEST(PinnedArenaTest, IsOnNoLedger) {
  const int64_t before = memory::host_allocated_bytes();
  const auto ledger = std::make_shared<memory::Ledger>("rank 1/2");
  const memory::LedgerScope scope(ledger);
  PinnedArena arena(1_MiB);
  const at::Tensor tensor = arena.take(1000, at::kFloat);
  EXPECT_EQ(ledger->now().total(), 0);
  EXPECT_EQ(memory::host_allocated_bytes(), before);
  EXPECT_FALSE(memory::assign(tensor, memory::Kind::kOptimizerState));
}

TEST(PinnedArenaTest, RefusesMoreThanTheHostHasBeforeItTakesAny) {
  const std::string error = error_of([] { PinnedArena(int64_t{1} << 50); });
  EXPECT_THAT(error, HasSubstr("PinnedArena: needs 1024.0 TiB on the host, which has "));
  EXPECT_THAT(error, HasSubstr("MemAvailable "));
  EXPECT_THAT(error_of([] { PinnedArena(0); }), HasSubstr("expected 1 byte or more, got 0"));
  EXPECT_THAT(error_of([] { PinnedArena(64).take(-1, at::kFloat); }), HasSubstr("got -1"));
  EXPECT_THAT(error_of([] { PinnedArena(64, {.cores = CoreSet{{.cpus = {100000}}}}); }),
              HasSubstr("does not bind a thread"));
}

TEST(PinnedArenaTest, IsPageLockedForCudaOrSaysWhyNot) {
  // Until then LibTorch says of no memory that it is page-locked.
  if (torch::cuda::is_available()) at::globalContext().lazyInitDevice(at::kCUDA);
  const std::string obstacle = error_of([] {
    PinnedArena arena(1_MiB, {.device = c10::Device(c10::DeviceType::CUDA, 0)});
    EXPECT_TRUE(arena.take(1000, at::kFloat).is_pinned());
  });
  if (torch::cuda::is_available()) {
    EXPECT_EQ(obstacle, "");
  } else {
    EXPECT_THAT(obstacle, HasSubstr("CUDA"));
  }
}

TEST(PageNodesTest, TellsPagesThatNobodyTouched) {
  void* const mapped =
      mmap(nullptr, 16384, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  static_cast<char*>(mapped)[8192] = 1;
  // From the middle of the second page to the beginning of the fourth.
  const std::string refused = error_of([&] {
    const auto nodes = page_nodes(static_cast<char*>(mapped) + 6000, 7000);
    ASSERT_EQ(nodes.size(), 3U);
    EXPECT_EQ(nodes[0], kNotTouched);
    EXPECT_GE(nodes[1], 0);
    EXPECT_EQ(nodes[2], kNotTouched);
  });
  EXPECT_THAT(refused, ::testing::AnyOf(::testing::IsEmpty(), HasSubstr("move_pages")));
  munmap(mapped, 16384);
}

TEST(PageNodesTest, SaysInALineHowManyBytesLieWhere) {
  EXPECT_EQ(describe(BytesByNode{{kNotTouched, 4096}, {0, 48_MiB}, {1, 16_MiB}}),
            "48.0 MiB on node 0, 16.0 MiB on node 1, 4.0 KiB not touched");
  EXPECT_EQ(describe(BytesByNode{}), "nothing");
}

}  // namespace
}  // namespace zeropage::device::pinned_arena_test
