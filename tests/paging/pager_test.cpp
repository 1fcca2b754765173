#include "paging/pager.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "paging/pins.h"
#include "tests/harness/errors.h"
#include "tests/harness/fake_page_source.h"
#include "zeropage/check.h"
#include "zeropage/testing.h"

namespace zeropage::paging::pager_test {
namespace {

using memory::operator""_KiB;
using memory::operator""_MiB;

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAre;
using zeropage::testing::error_of;
using zeropage::testing::FakePages;
using zeropage::testing::FakePaging;

constexpr int64_t kPageBytes = 4_KiB;
constexpr int64_t kAnyBudget = 0;

// Page p is called "p<p>" and holds floats of value p, until something is written.
class PagerTest : public ::testing::Test {
 protected:
  void make(const std::vector<int64_t>& page_bytes, PagerOptions options) {
    paging_.emplace(std::move(options));
    tensors_.clear();
    for (size_t page = 0; page < page_bytes.size(); ++page) {
      tensors_.push_back(at::full({page_bytes[page] / 4}, static_cast<double>(page), at::kFloat));
      paging_->add(c10::str("p", page), tensors_.back());
    }
  }
  // `count` pages of kPageBytes; the budget in pages.
  void make_pages(size_t count, int64_t budget_pages, int64_t prefetch_pages = 0) {
    make(std::vector<int64_t>(count, kPageBytes), {.budget_bytes = budget_pages * kPageBytes,
                                                   .prefetch_bytes = prefetch_pages * kPageBytes});
  }

  Pager& pager() { return *paging_->pager; }
  FakePages& pages() { return *paging_->pages; }

  // The pages stay while what is returned lives.
  std::unique_ptr<Pins> keep(const std::vector<size_t>& uses, bool writes = false,
                             std::string_view who = "aten::op") {
    auto pins = std::make_unique<Pins>();
    for (const size_t page : uses) pins->add({paging_->pager, page}, writes);
    pins->take(who);
    return pins;
  }
  // One operator on the pages.
  void use(const std::vector<size_t>& uses) { keep(uses); }
  void use_each(const std::vector<size_t>& order) {
    for (const size_t page : order) use({page});
  }
  void write(size_t page, float value) {
    const auto pins = keep({page}, /*writes=*/true);
    pager().buffer(page).fill_(value);
  }
  float read(size_t page) {
    const auto pins = keep({page});
    return pager().buffer(page)[0].item<float>();
  }
  // Records a pass and leaves nothing resident.
  void record(const std::vector<size_t>& order) {
    use_each(order);
    begin_again();
  }
  void begin_again() {
    pager().release_all("the test");
    pager().end_pass(Pass::kTraining);
    pages().fetched.clear();
  }
  bool is_resident(size_t page) { return tensors_[page].data_ptr() != nullptr; }
  // The fetches of one more pass over `order`.
  std::vector<size_t> fetches_of(const std::vector<size_t>& order) {
    pages().fetched.clear();
    use_each(order);
    return pages().fetched;
  }

  std::vector<at::Tensor> tensors_;
  std::optional<FakePaging> paging_;
};

// ---- faults and eviction ----

TEST_F(PagerTest, BringsAPageWhenItIsUsedAndKeepsItForTheNextUse) {
  make_pages(3, kAnyBudget);
  EXPECT_EQ(pager().resident_bytes(), 0);
  EXPECT_FALSE(is_resident(1));
  {
    const auto pins = keep({1});
    EXPECT_TRUE(pager().is_pinned(1));
    EXPECT_FALSE(pager().is_pinned(0));
    EXPECT_EQ(tensors_[1].data_ptr(), pager().buffer(1).data_ptr());
  }
  EXPECT_FALSE(pager().is_pinned(1));
  use({1});
  EXPECT_THAT(pages().fetched, ElementsAre(1));
  EXPECT_EQ(pager().resident_bytes(), kPageBytes);
}

TEST_F(PagerTest, PutsEachStorageAtItsPlaceInThePage) {
  paging_.emplace();
  const auto first = at::full({3}, 1.0F), second = at::full({5}, 2.0F);
  const auto half = second.narrow(0, 2, 3);
  const size_t page = paging_->add_storages("pair", {{first}, {second, half}});
  const auto pins = keep({page});
  const char* begin = static_cast<char*>(pager().buffer(page).data_ptr());
  EXPECT_EQ(first.data_ptr(), begin);
  EXPECT_EQ(second.data_ptr(), begin + 12);
  EXPECT_EQ(half.data_ptr(), begin + 20);
  EXPECT_TRUE(at::equal(pager().buffer(page), at::tensor({1, 1, 1, 2, 2, 2, 2, 2}, at::kFloat)));
}

TEST_F(PagerTest, EvictsThePageTouchedLongestAgoWithoutAPlan) {
  make_pages(4, 3);
  use_each({0, 1, 2, 0, 3});
  EXPECT_TRUE(is_resident(0) && is_resident(2) && is_resident(3));
  EXPECT_FALSE(is_resident(1));
  use({1});
  EXPECT_FALSE(is_resident(2));
  EXPECT_THAT(pages().fetched, ElementsAre(0, 1, 2, 3, 1));
}

TEST_F(PagerTest, EvictsThePageUsedFurthestInThePlan) {
  make_pages(4, 3);
  const std::vector<size_t> order = {0, 1, 2, 3, 0, 1, 2};
  record(order);
  // For page 3 goes 2, whose next use is furthest; the least recently touched would be 0.
  EXPECT_THAT(fetches_of(order), ElementsAre(0, 1, 2, 3, 2));
}

// The fewest fetches with which `order` can be served from nothing, by trying every victim.
int64_t fewest_fetches(const std::vector<size_t>& order, size_t slots) {
  std::map<std::set<size_t>, int64_t> costs = {{{}, 0}};
  for (const size_t page : order) {
    std::map<std::set<size_t>, int64_t> next;
    const auto reach = [&](const std::set<size_t>& held, int64_t cost) {
      const auto [at, is_new] = next.try_emplace(held, cost);
      at->second = std::min(at->second, cost);
    };
    for (const auto& [held, cost] : costs) {
      if (held.contains(page)) {
        reach(held, cost);
        continue;
      }
      auto with = held;
      with.insert(page);
      if (with.size() <= slots) {
        reach(with, cost + 1);
        continue;
      }
      for (const size_t victim : held) {
        auto without = with;
        without.erase(victim);
        reach(without, cost + 1);
      }
    }
    costs = std::move(next);
  }
  return std::min_element(
             costs.begin(), costs.end(),
             [](const auto& left, const auto& right) { return left.second < right.second; })
      ->second;
}

TEST_F(PagerTest, FetchesAsRarelyAsAnyOrderOfEvictionsCould) {
  std::mt19937 random(7);
  int64_t by_plan = 0, without_plan = 0;
  for (int trial = 0; trial < 60; ++trial) {
    const size_t count = 3 + random() % 5, slots = 1 + random() % 4;
    std::vector<size_t> order(20 + random() % 20);
    for (size_t& page : order) page = random() % count;
    make_pages(count, static_cast<int64_t>(slots));
    without_plan += static_cast<int64_t>(fetches_of(order).size());
    begin_again();
    const auto fetches = static_cast<int64_t>(fetches_of(order).size());
    by_plan += fetches;
    EXPECT_EQ(fetches, fewest_fetches(order, slots))
        << "trial " << trial << ", " << slots << " slots, order "
        << ::testing::PrintToString(order);
  }
  EXPECT_LT(by_plan, without_plan * 9 / 10) << "the plan was of no use: these traces are too easy";
}

TEST_F(PagerTest, FallsBackToDemandWhenAPassDepartsAndPlansTheNewOrder) {
  make_pages(5, 3, 2);
  record({0, 1, 2, 3});
  EXPECT_THAT(fetches_of({4}), ElementsAre(4)) << "nothing is fetched ahead off the plan";
  EXPECT_THAT(fetches_of({2, 0}), ElementsAre(2, 0));
  begin_again();
  EXPECT_THAT(fetches_of({4}), ElementsAre(4, 2, 0)) << "the new order is the plan";
}

TEST_F(PagerTest, FollowsATraceForTrainingAndAnotherForInference) {
  make_pages(6, 6, 2);
  record({0, 1, 2});
  {
    const at::NoGradGuard no_grad;
    use_each({3, 4, 5});
    pager().release_all("the test");
    pager().end_pass(Pass::kInference);
    EXPECT_THAT(fetches_of({3}), ElementsAre(3, 4, 5));
  }
  EXPECT_THAT(fetches_of({0}), ElementsAre(0, 1, 2)) << "inference changed the training plan";
}

TEST_F(PagerTest, LeavesTheTraceAloneForWhatHappensAside) {
  make_pages(4, 4, 1);
  record({0, 1, 2});
  use({0});
  {
    Pins guard;
    guard.add({paging_->pager, 3}, false);
    guard.take_outside_trace("GatheredParameters");
  }
  EXPECT_THAT(fetches_of({1}), ElementsAre(2)) << "1 had come ahead; the plan goes on to 2";
}

TEST_F(PagerTest, EvictsTheSamePageAfterALookAtWhatAGuardHolds) {
  make_pages(4, 3);
  const std::vector<size_t> order = {0, 1, 2, 3, 0, 1, 2};
  record(order);
  use_each({0, 1, 2});
  {
    Pins guard;
    guard.add({paging_->pager, 0}, false);
    guard.take_outside_trace("GatheredParameters");
    // One rank of several may do so without gradients: its pass would be that of an evaluation.
    const at::NoGradGuard no_grad;
    use({0});
  }
  pages().fetched.clear();
  use({3});
  EXPECT_TRUE(is_resident(0)) << "by the plan 2 goes, which is used last";
  EXPECT_FALSE(is_resident(2));
}

// ---- prefetch ----

TEST_F(PagerTest, PrefetchesInTheOrderOfThePlanAsFarAsItsBytesReach) {
  make({4_KiB, 8_KiB, 4_KiB, 16_KiB, 4_KiB}, {.budget_bytes = 64_KiB, .prefetch_bytes = 12_KiB});
  record({0, 2, 1, 3, 4});
  EXPECT_THAT(fetches_of({0}), ElementsAre(0, 2, 1)) << "8 and 4 KiB fit 12 KiB ahead";
  EXPECT_THAT(fetches_of({2}), IsEmpty()) << "8 of 12 KiB are there; 16 more do not fit";
  EXPECT_THAT(fetches_of({1}), IsEmpty()) << "16 KiB at once are more than 12";
  EXPECT_THAT(fetches_of({3}), ElementsAre(3, 4));
  EXPECT_THAT(fetches_of({4}), IsEmpty());
}

TEST_F(PagerTest, PrefetchesNothingAtADepthOfNothing) {
  make_pages(4, 4, 0);
  record({0, 1, 2, 3});
  EXPECT_THAT(fetches_of({0}), ElementsAre(0));
  EXPECT_THAT(fetches_of({1}), ElementsAre(1));
  EXPECT_EQ(pager().statistics().prefetched, 0);
}

TEST_F(PagerTest, PrefetchesTwoLargestPagesUnlessToldOtherwise) {
  make({8_KiB, 4_KiB, 4_KiB, 4_KiB, 4_KiB, 4_KiB}, {.budget_bytes = 1_MiB});
  record({0, 1, 2, 3, 4, 5});
  EXPECT_THAT(fetches_of({0}), ElementsAre(0, 1, 2, 3, 4));
}

TEST_F(PagerTest, NeverEvictsForAPrefetchWhatIsUsedEarlier) {
  make_pages(4, 3, 3);
  record({0, 1, 2, 0, 3});
  EXPECT_THAT(fetches_of({0}), ElementsAre(0, 1, 2)) << "3 must not displace what comes before it";
  EXPECT_THAT(fetches_of({1}), IsEmpty());
  EXPECT_THAT(fetches_of({2}), ElementsAre(3)) << "1 is done with and makes room";
  EXPECT_THAT(fetches_of({0, 3}), IsEmpty());
}

TEST_F(PagerTest, KeepsAndLaterDropsAPrefetchedPageThatNothingUsed) {
  make_pages(5, 3, 2);
  pages().on_arrival = [](size_t) { std::this_thread::sleep_for(std::chrono::milliseconds(1)); };
  record({0, 1, 2});
  const auto before = pager().statistics();
  use({0});
  EXPECT_EQ(pager().resident_bytes(), 3 * kPageBytes) << "1 and 2 are on their way";
  use_each({3, 4});
  EXPECT_THAT(pages().fetched, ElementsAre(0, 1, 2, 3, 4));
  const auto since = pager().statistics() - before;
  EXPECT_EQ(since.prefetched, 0) << "what nothing used is no success";
  EXPECT_EQ(since.faults, 3);
  EXPECT_EQ(pager().resident_bytes(), 3 * kPageBytes);
  begin_again();
  EXPECT_EQ(pager().resident_bytes(), 0);
  EXPECT_EQ(read(1), 1.0F);
}

TEST_F(PagerTest, WaitsForAPrefetchedPageWhenItIsUsedTooEarly) {
  make_pages(2, 2, 1);
  record({0, 1});
  // Long beside what another process may take of this core between the two uses.
  pages().on_arrival = [](size_t) { std::this_thread::sleep_for(std::chrono::milliseconds(100)); };
  const auto before = pager().statistics();
  use({0});
  EXPECT_EQ(read(1), 1.0F);
  const auto since = pager().statistics() - before;
  EXPECT_EQ(since.faults, 1);
  EXPECT_EQ(since.prefetched, 1);
  EXPECT_GE(since.wait_seconds, 0.004);
}

// ---- budget ----

TEST_F(PagerTest, NeverHoldsMoreThanItsBudget) {
  std::mt19937 random(11);
  for (int trial = 0; trial < 30; ++trial) {
    const size_t count = 4 + random() % 8;
    std::vector<int64_t> sizes(count);
    for (int64_t& bytes : sizes) bytes = kPageBytes * (1 + random() % 4);
    std::vector<std::vector<size_t>> operators(30);
    int64_t most_at_once = *std::max_element(sizes.begin(), sizes.end());
    for (auto& uses : operators) {
      std::set<size_t> distinct;
      for (size_t n = 1 + random() % 3; n > 0; --n) distinct.insert(random() % count);
      uses.assign(distinct.begin(), distinct.end());
      std::shuffle(uses.begin(), uses.end(), random);
      int64_t at_once = 0;
      for (const size_t page : uses) at_once += sizes[page];
      most_at_once = std::max(most_at_once, at_once);
    }
    const int64_t budget = most_at_once + kPageBytes * (random() % 6);
    const auto ledger = std::make_shared<memory::Ledger>();
    const memory::LedgerScope scope(ledger);
    make(sizes, {.budget_bytes = budget});
    pages().on_arrival = [trial](size_t page) {
      std::this_thread::sleep_for(std::chrono::microseconds((page * 37 + trial) % 50));
    };
    pages().fetched.reserve(10000);
    const int64_t base = ledger->now().total();
    ledger->reset_peak();
    for (int pass = 0; pass < 3; ++pass) {
      for (const auto& uses : operators) {
        const auto pins = keep(uses, /*writes=*/random() % 3 == 0);
        EXPECT_LE(pager().resident_bytes(), budget);
        for (const size_t page : uses) {
          EXPECT_EQ(*static_cast<float*>(tensors_[page].data_ptr()), static_cast<float>(page));
        }
      }
      if (random() % 2 == 0) pager().release_all("the test");
      pager().end_pass(Pass::kTraining);
    }
    EXPECT_PEAK_BYTES_LE(*ledger, base + budget) << "trial " << trial;
    pager().release_all("the test");
    EXPECT_EQ(ledger->now().total(), base);
    paging_.reset();
  }
}

TEST_F(PagerTest, RefusesAnOperatorThatNeedsMoreThanTheBudgetAndGoesOn) {
  make_pages(4, 2);
  use({3});
  const std::string message = error_of([&] { keep({0, 1, 2}, false, "aten::cat"); });
  EXPECT_THAT(message, AllOf(HasSubstr("aten::cat needs parameter pages"), HasSubstr("\"p0\""),
                             HasSubstr("\"p1\""), HasSubstr("\"p2\" (4.0 KiB)"),
                             HasSubstr("12.0 KiB, but the budget is 8.0 KiB"),
                             HasSubstr("raise it to at least 12288 bytes")));
  EXPECT_THAT(message, Not(HasSubstr("beside")));
  for (size_t page = 0; page < 4; ++page) EXPECT_FALSE(pager().is_pinned(page));
  EXPECT_EQ(read(0) + read(1) + read(2), 3.0F);
  const auto two = keep({0, 1});
  EXPECT_EQ(pager().resident_bytes(), 2 * kPageBytes);
}

TEST_F(PagerTest, SaysWhatAGuardKeepsWhenAnOperatorDoesNotFitBesideIt) {
  make({4_KiB, 4_KiB, 4_KiB},
       {.what = "gradient", .budget_bytes = 8_KiB, .budget_option = "options.gradient_bytes"});
  {
    const auto guard = keep({0, 1});
    EXPECT_THAT(
        error_of([&] { use({2}); }),
        AllOf(HasSubstr("gradient pages \"p2\""), HasSubstr("beside 8.0 KiB"),
              HasSubstr("options.gradient_bytes is 8.0 KiB"), HasSubstr("at least 12288 bytes")));
    EXPECT_TRUE(pager().is_pinned(0) && pager().is_pinned(1));
    EXPECT_FALSE(pager().is_pinned(2));
    EXPECT_EQ(read(1), 1.0F) << "what the guard keeps is at hand";
  }
  EXPECT_EQ(read(2), 2.0F);
}

TEST_F(PagerTest, RefusesAPageLargerThanTheBudget) {
  EXPECT_THAT(error_of([&] {
                make({4_KiB, 12_KiB}, {.budget_bytes = 8_KiB});
              }),
              AllOf(HasSubstr("page \"p1\" has 12.0 KiB"), HasSubstr("the budget is 8.0 KiB"),
                    HasSubstr("at least 12288 bytes")));
}

TEST_F(PagerTest, GivesOneOperatorWhatItNeedsWithoutAnExplicitBudget) {
  make_pages(5, kAnyBudget);
  {
    const auto pins = keep({0, 1, 2, 3});
    EXPECT_EQ(pager().resident_bytes(), 4 * kPageBytes);
  }
  use({4});
  EXPECT_LE(pager().resident_bytes(), 2 * kPageBytes) << "two largest pages when nothing asks more";
}

TEST_F(PagerTest, DropsWhatThePlanDoesNotNeedSoonWithoutAnExplicitBudget) {
  make_pages(4, kAnyBudget, 0);
  record({0, 1, 2, 3, 0});
  use({0});
  use({1});
  EXPECT_TRUE(is_resident(1));
  EXPECT_FALSE(is_resident(0)) << "2 and 3 come first";
  begin_again();
  record({2, 3, 2});
  use_each({2, 3});
  EXPECT_TRUE(is_resident(2)) << "used next, and there is room for two";
  use({2});
  EXPECT_TRUE(is_resident(2));
  EXPECT_FALSE(is_resident(3)) << "not used again in this pass";
}

TEST_F(PagerTest, KeepsEverythingUntilItIsReleasedIfTold) {
  make(std::vector<int64_t>(6, kPageBytes),
       {.prefetch_bytes = 0, .retention = Retention::kUntilReleased});
  const std::vector<size_t> order = {0, 1, 2, 3, 4, 5, 0};
  for (int pass = 0; pass < 3; ++pass) {
    use_each(order);
    pager().end_pass(Pass::kTraining);
  }
  EXPECT_EQ(pager().resident_bytes(), 6 * kPageBytes);
  EXPECT_EQ(pager().statistics().evictions, 0);
  EXPECT_EQ(pages().fetched.size(), 6U);
  pager().release_all("the test");
  EXPECT_EQ(pager().resident_bytes(), 0);
}

TEST_F(PagerTest, EvictsForTheBudgetEvenWhatIsKeptUntilReleased) {
  make(std::vector<int64_t>(4, kPageBytes), {.budget_bytes = 2 * kPageBytes,
                                             .prefetch_bytes = 0,
                                             .retention = Retention::kUntilReleased});
  use_each({0, 1, 2});
  EXPECT_EQ(pager().resident_bytes(), 2 * kPageBytes);
  EXPECT_FALSE(is_resident(0));
}

TEST_F(PagerTest, KeepsPagesOfNoBytesOutOfTheBudget) {
  const auto free_of_cost = at::full({1024}, 5.0F);
  paging_.emplace(PagerOptions{.budget_bytes = kPageBytes});
  set_trap(free_of_cost);
  this->pages().values.push_back(free_of_cost.clone());
  pager().add_page("free", 0, {{free_of_cost.storage(), 0}});
  tensors_ = {free_of_cost, at::full({1024}, 6.0F)};
  paging_->add("paid", tensors_[1]);
  use({0, 1});
  EXPECT_EQ(pager().resident_bytes(), kPageBytes);
  pager().release_unpinned();
  EXPECT_TRUE(is_resident(0)) << "dropping it would free nothing";
  EXPECT_FALSE(is_resident(1));
  pager().release_all("the test");
  EXPECT_FALSE(is_resident(0));
}

// ---- writes ----

TEST_F(PagerTest, WritesADirtyPageBackOnceWhenItGoes) {
  make_pages(3, 1);
  write(0, 7);
  write(0, 8);
  EXPECT_THAT(pages().written_back, IsEmpty()) << "not before it goes";
  EXPECT_EQ(read(1), 1.0F);
  EXPECT_THAT(pages().written_back, ElementsAre(0));
  EXPECT_EQ(read(0), 8.0F);
  EXPECT_EQ(read(2), 2.0F);
  EXPECT_THAT(pages().written_back, ElementsAre(0)) << "it was only read since";
}

TEST_F(PagerTest, WritesBackWhatWasWrittenWhileOthersReadIt) {
  make_pages(2, 2);
  const auto reads = keep({0});
  write(0, 9);
  EXPECT_FALSE(error_of([&] { pager().release_all("step()"); }).empty());
  pager().release_unpinned();
  EXPECT_TRUE(is_resident(0)) << "it is in use";
  EXPECT_THAT(pages().written_back, IsEmpty());
}

TEST_F(PagerTest, ThrowsFromTheEndOfAnOperatorWhenAPageThatGoesCannotBeWrittenBack) {
  make(std::vector<int64_t>(4, kPageBytes), {});
  bool fails = true;
  pages().on_write_back = [&](size_t) { ZP_CHECK(!fails, "the disk is full"); };
  const auto write_beyond_the_limit = [&](size_t page, bool throws) {
    const auto others = keep({2, 3});
    Pins pins;
    pins.add({paging_->pager, page}, /*writes=*/true);
    pins.take("aten::op");
    pager().buffer(page).fill_(7);
    if (throws) throw std::runtime_error("of the operator");
  };
  EXPECT_EQ(error_of([&] { write_beyond_the_limit(1, true); }), "of the operator")
      << "one exception at a time";
  fails = false;
  pager().release_all("the test");
  fails = true;
  EXPECT_THAT(error_of([&] { write_beyond_the_limit(0, false); }), HasSubstr("the disk is full"));
  fails = false;
  pager().release_all("the test");
  EXPECT_EQ(read(0), 7.0F) << "what could not be written was not let go";
  EXPECT_EQ(read(1), 7.0F);
}

TEST_F(PagerTest, WritesOnePageBackAndKeepsIt) {
  make_pages(2, 2);
  write(0, 5);
  pager().write_back(0);
  pager().write_back(1);
  EXPECT_THAT(pages().written_back, ElementsAre(0));
  EXPECT_TRUE(is_resident(0));
  pager().release_all("the test");
  EXPECT_THAT(pages().written_back, ElementsAre(0)) << "nothing was written since";
}

TEST_F(PagerTest, ReleasesEverythingAndWritesBackWhatIsDirty) {
  make_pages(4, 4);
  use({1});
  write(2, 20);
  write(3, 30);
  pager().release_all("the test");
  EXPECT_EQ(pager().resident_bytes(), 0);
  EXPECT_THAT(pages().written_back, UnorderedElementsAre(2, 3));
  for (size_t page = 0; page < 4; ++page) EXPECT_FALSE(is_resident(page));
  EXPECT_EQ(read(3), 30.0F);
}

TEST_F(PagerTest, RefusesToReleaseAllWhileAPageIsInUse) {
  make_pages(3, 3);
  use({0});
  const auto guard = keep({1});
  EXPECT_THAT(error_of([&] { pager().release_all("step()"); }),
              AllOf(HasSubstr("step(): parameter page \"p1\" is still in use"),
                    HasSubstr("let the guard")));
  EXPECT_TRUE(is_resident(0)) << "all or nothing";
  EXPECT_TRUE(is_resident(1));
}

TEST_F(PagerTest, ReleasesWhatIsNotInUse) {
  make_pages(3, 3);
  use({0});
  write(2, 5);
  const auto guard = keep({1});
  pager().release_unpinned();
  EXPECT_FALSE(is_resident(0) || is_resident(2));
  EXPECT_TRUE(is_resident(1));
  EXPECT_THAT(pages().written_back, ElementsAre(2));
  EXPECT_EQ(pager().resident_bytes(), kPageBytes);
}

TEST_F(PagerTest, CountsFaultsPrefetchesEvictionsAndBytes) {
  make({4_KiB, 8_KiB, 4_KiB, 8_KiB}, {.budget_bytes = 16_KiB, .prefetch_bytes = 8_KiB});
  std::mt19937 random(5);
  std::vector<size_t> order(40);
  for (size_t& page : order) page = random() % 4;
  for (int pass = 0; pass < 3; ++pass) {
    use_each(order);
    pager().end_pass(Pass::kTraining);
  }
  pager().release_all("the test");
  const memory::PagingStatistics statistics = pager().statistics();
  const auto fetches = static_cast<int64_t>(pages().fetched.size());
  EXPECT_EQ(statistics.evictions, fetches) << "all that came have gone";
  EXPECT_GT(statistics.prefetched, 0);
  EXPECT_GT(statistics.faults, 0);
  EXPECT_EQ(statistics.faults + statistics.prefetched, fetches) << "all that came were used";
  int64_t bytes = 0;
  for (const size_t page : pages().fetched) bytes += page % 2 == 0 ? 4_KiB : 8_KiB;
  EXPECT_EQ(statistics.bytes_gathered, bytes);
  memory::PagingStatistics doubled = statistics;
  doubled += statistics;
  EXPECT_EQ((doubled - statistics).bytes_gathered, bytes);
}

// ---- errors of the source ----

TEST_F(PagerTest, PassesOnTheErrorOfAFetchThatCannotBeginAndTriesAgainLater) {
  make_pages(3, 3);
  pages().on_start = [](size_t page) {
    if (page == 1) throw std::runtime_error("the disk is gone");
  };
  EXPECT_EQ(error_of([&] { use({0, 1, 2}); }), "the disk is gone");
  for (size_t page = 0; page < 3; ++page) EXPECT_FALSE(pager().is_pinned(page));
  EXPECT_EQ(error_of([&] { use({1}); }), "the disk is gone");
  EXPECT_EQ(read(0), 0.0F);
  pages().on_start = nullptr;
  EXPECT_EQ(read(1), 1.0F);
  EXPECT_EQ(read(2), 2.0F);
  pager().release_all("the test");
  EXPECT_EQ(pager().resident_bytes(), 0);
}

TEST_F(PagerTest, PassesOnTheErrorOfAPrefetchThatCannotBeginAndTriesAgainLater) {
  make_pages(3, 3, 1);
  record({0, 1, 2});
  pages().on_start = [](size_t page) {
    if (page == 1) throw std::runtime_error("the disk is gone");
  };
  EXPECT_EQ(error_of([&] { use({0}); }), "the disk is gone");
  EXPECT_FALSE(pager().is_pinned(0));
  pages().on_start = nullptr;
  EXPECT_EQ(read(0) + read(1) + read(2), 3.0F);
}

TEST_F(PagerTest, PassesOnTheErrorOfAFetchThatFailsUnderWayAndTriesAgainLater) {
  make_pages(3, 3);
  pages().on_arrival = [](size_t page) {
    if (page == 1) throw std::runtime_error("the link is down");
  };
  EXPECT_EQ(error_of([&] { use({0, 1, 2}); }), "the link is down");
  for (size_t page = 0; page < 3; ++page) EXPECT_FALSE(pager().is_pinned(page));
  EXPECT_EQ(read(2), 2.0F);
  pages().on_arrival = nullptr;
  EXPECT_EQ(read(1), 1.0F) << "fetched anew";
  pager().release_all("the test");
  EXPECT_EQ(pager().resident_bytes(), 0);
}

TEST_F(PagerTest, LetsAPrefetchThatFailedGoWhenNothingUsedIt) {
  make_pages(4, 2, 1);
  record({0, 1, 2});
  pages().on_arrival = [](size_t page) {
    if (page == 1) throw std::runtime_error("the link is down");
  };
  use({0});
  EXPECT_THAT(pages().fetched, ElementsAre(0, 1));
  EXPECT_EQ(error_of([&] { use_each({2, 3, 0}); }), "") << "none of these asked for page 1";
  EXPECT_EQ(error_of([&] { use({1}); }), "the link is down");
  pager().release_all("the test");
  EXPECT_EQ(pager().resident_bytes(), 0);
}

// ---- threads ----

TEST_F(PagerTest, ServesSeveralThreadsWithinATightBudget) {
  constexpr int kThreads = 4, kOperators = 100;
  const auto ledger = std::make_shared<memory::Ledger>();
  const memory::LedgerScope scope(ledger);
  make_pages(6, 2);
  pages().on_arrival = [](size_t page) {
    std::this_thread::sleep_for(std::chrono::microseconds(page * 17));
  };
  pages().fetched.reserve(kThreads * kOperators);
  const int64_t base = ledger->now().total();
  ledger->reset_peak();
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      const memory::LedgerScope scope(ledger);
      std::mt19937 random(static_cast<unsigned>(thread));
      for (int op = 0; op < kOperators; ++op) {
        const size_t page = random() % 6;
        const auto pins = keep({page});
        if (pager().resident_bytes() > 2 * kPageBytes) ++wrong;
        const auto* data = static_cast<const float*>(tensors_[page].data_ptr());
        if (data == nullptr || data[kPageBytes / 4 - 1] != static_cast<float>(page)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_PEAK_BYTES_LE(*ledger, base + 2 * kPageBytes);
  for (size_t page = 0; page < 6; ++page) EXPECT_FALSE(pager().is_pinned(page));
}

TEST_F(PagerTest, FetchesAPageOnceForThreadsThatWantItTogether) {
  make_pages(1, 1);
  pages().on_arrival = [](size_t) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); };
  std::vector<std::thread> threads;
  std::atomic<int> right = 0;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      const auto pins = keep({0});
      if (tensors_[0].data_ptr() != nullptr) ++right;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 4);
  EXPECT_EQ(pages().fetched.size(), 1U);
  EXPECT_EQ(pager().statistics().faults, 1);
}

TEST_F(PagerTest, MakesAThreadWaitUntilOthersLetGo) {
  make_pages(2, 1);
  std::atomic<bool> let_go = false;
  auto guard = keep({0});
  bool came_after = false;
  std::thread other([&] {
    const auto pins = keep({1});
    came_after = let_go;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  let_go = true;
  guard.reset();
  other.join();
  EXPECT_TRUE(came_after);
}

TEST_F(PagerTest, RefusesAThreadThatHoldsPagesRatherThanLetItWaitForEver) {
  make_pages(4, 2);
  const auto mine = keep({0});
  std::promise<void> taken, finish;
  std::thread other([&] {
    const auto pins = keep({1});
    taken.set_value();
    finish.get_future().wait();
  });
  taken.get_future().wait();
  EXPECT_THAT(error_of([&] { use({2}); }), HasSubstr("needs parameter pages \"p2\""));
  EXPECT_FALSE(pager().is_pinned(2));
  finish.set_value();
  other.join();
  EXPECT_EQ(read(2), 2.0F) << "the other page may go now";
}

TEST_F(PagerTest, LetsAThreadWaitAgainAfterItsErrors) {
  make_pages(3, 1);
  pages().on_start = [](size_t) { throw std::runtime_error("no"); };
  EXPECT_EQ(error_of([&] { use({0}); }), "no");
  EXPECT_FALSE(error_of([&] { use({0, 1}); }).empty());
  pages().on_start = nullptr;
  std::promise<void> taken;
  std::thread other([&] {
    const auto pins = keep({1});
    taken.set_value();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  });
  taken.get_future().wait();
  EXPECT_EQ(error_of([&] { use({2}); }), "") << "it holds nothing, so it may wait";
  other.join();
}

// ---- lifetime ----

TEST_F(PagerTest, LeavesTensorsWithoutMemoryWhenItGoes) {
  make_pages(2, 2);
  use({0});
  EXPECT_TRUE(is_resident(0));
  paging_.reset();
  EXPECT_FALSE(is_resident(0)) << "its buffer is gone";
  EXPECT_THAT(error_of([&] { tensors_[0].sum(); }), HasSubstr("outlived"));
  EXPECT_THAT(error_of([&] { tensors_[1].view({-1, 2}); }), HasSubstr("outlived"));
  EXPECT_EQ(tensors_[0].numel(), kPageBytes / 4) << "what needs no values still works";
}

TEST_F(PagerTest, LivesAsLongAsPinsOnIt) {
  make_pages(1, 1);
  const auto pins = keep({0});
  paging_.reset();
  EXPECT_EQ(tensors_[0].sum().item<float>(), 0.0F);
  EXPECT_TRUE(is_resident(0));
}

TEST_F(PagerTest, GoesWhileAPageIsOnItsWay) {
  make_pages(2, 2, 1);
  record({0, 1});
  pages().on_arrival = [](size_t page) {
    std::this_thread::sleep_for(std::chrono::milliseconds(page * 10));
  };
  use({0});
  paging_.reset();
  EXPECT_FALSE(is_resident(1));
}

TEST_F(PagerTest, LeavesOtherPagersAlone) {
  make_pages(2, 1);
  FakePaging other({.budget_bytes = kPageBytes});
  const auto tensor = at::full({kPageBytes / 4}, 5.0F);
  other.add("other", tensor);
  {
    Pins pins;
    pins.add({paging_->pager, 0}, false);
    pins.add({other.pager, 0}, true);
    pins.add({paging_->pager, 0}, false);
    pins.take("aten::op");
    EXPECT_TRUE(pager().is_pinned(0) && other.pager->is_pinned(0));
  }
  EXPECT_FALSE(pager().is_pinned(0) || other.pager->is_pinned(0));
  use({1});
  other.pager->release_all("the test");
  EXPECT_THAT(other.pages->written_back, ElementsAre(0));
  EXPECT_THAT(pages().written_back, IsEmpty());
}

TEST_F(PagerTest, AViewOfOneStorageLeavesThoseBesideItInThePageAlone) {
  FakePaging paging;
  const std::vector<at::Tensor> tensors = {at::ones({4}), at::ones({4}), at::ones({4})};
  const size_t page = paging.add_storages("p", {{tensors[0]}, {tensors[1]}, {tensors[2]}});
  const auto seen = [&] {
    std::vector<bool> seen;
    for (const at::Tensor& tensor : tensors) {
      seen.push_back(tensor.storage().device() != at::kMeta);
    }
    return seen;
  };
  const auto storage = [&](size_t index) -> c10::StorageImpl& {
    return *tensors[index].storage().unsafeGetStorageImpl();
  };
  EXPECT_THAT(seen(), ElementsAre(false, false, false));
  paging.pager->begin_view(page, storage(1));
  EXPECT_THAT(seen(), ElementsAre(false, true, false));
  paging.pager->begin_view(page, storage(1));
  paging.pager->begin_view(page, storage(2));
  paging.pager->end_view(page, storage(1));
  EXPECT_THAT(seen(), ElementsAre(false, true, true)) << "another operator still makes one";
  paging.pager->end_view(page, storage(1));
  EXPECT_THAT(seen(), ElementsAre(false, false, true));
  paging.pager->end_view(page, storage(2));
  EXPECT_THAT(seen(), ElementsAre(false, false, false));
}

TEST_F(PagerTest, PinsKnowEachOfManyPagesOnce) {
  constexpr size_t kPages = 40;
  make_pages(kPages, kAnyBudget);
  Pins pins;
  for (const bool writes : {false, true}) {
    for (size_t page = 0; page < kPages; ++page) {
      pins.add({paging_->pager, page}, writes && page % 2 == 1);
    }
  }
  pins.take_outside_trace("the test");
  EXPECT_EQ(pages().fetched.size(), kPages);
  for (size_t page = 0; page < kPages; ++page) {
    EXPECT_EQ(pager().is_open_to_writes(page), page % 2 == 1) << page;
  }
}

}  // namespace
}  // namespace zeropage::paging::pager_test
