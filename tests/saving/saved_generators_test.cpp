// Which rank goes on with which generator of random numbers of a saved state.
#include "saving/detail/saved_generators.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"
#include "tests/harness/restarts.h"

namespace zeropage::saved_generators_test {
namespace {

using namespace zeropage::testing;
using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Mesh {
  int data = 1;
  int pipeline = 1;
  int tensor = 1;
};

// What own_generators() gives at that place. Ranks are threads here, so the generator is put in by hand.
json own_at(const Mesh& place, const Mesh& sizes, const json& states) {
  return {{"places", {place.data, place.pipeline, place.tensor}},
          {"sizes", {sizes.data, sizes.pipeline, sizes.tensor}},
          {"states", states}};
}

// By rank, in the order of a mesh {pipeline, tensor, data}; states_at: of a place.
template <typename StatesAt>
std::vector<json> ranks_of(const Mesh& sizes, const StatesAt& states_at) {
  std::vector<json> by_rank;
  for (int pipeline = 0; pipeline < sizes.pipeline; ++pipeline) {
    for (int tensor = 0; tensor < sizes.tensor; ++tensor) {
      for (int data = 0; data < sizes.data; ++data) {
        const Mesh place{data, pipeline, tensor};
        by_rank.push_back(own_at(place, sizes, states_at(place)));
      }
    }
  }
  return by_rank;
}

json seeded_by(int number) {
  return {{"cpu", "seed " + std::to_string(number)}};
}

std::vector<json> all_alike(const Mesh& sizes) {
  return ranks_of(sizes, [](const Mesh&) { return seeded_by(0); });
}

// Ranks that get other samples, or have other layers, draw numbers of their own.
std::vector<json> seeded_apart(const Mesh& sizes) {
  return ranks_of(sizes,
                  [](const Mesh& at) { return seeded_by(100 * at.pipeline + 10 * at.data); });
}

TEST(SavedGeneratorsTest, AreOneForAllRanksThatDrawAlike) {
  const json one = saving::merged_generators(all_alike({}));
  EXPECT_EQ(one.at("states").size(), 1U);
  EXPECT_EQ(saving::merged_generators(all_alike({2, 3, 2})), one) << "whatever the mesh";
  const json of_stages = saving::merged_generators(seeded_apart({2, 3, 2}));
  EXPECT_EQ(of_stages.at("axes"), json({{"data", 2}, {"pipeline", 3}}));
  EXPECT_EQ(of_stages.at("states").size(), 6U);
}

TEST(SavedGeneratorsTest, GoBackToTheirPlacesWhateverTheOrderOfTheAxes) {
  run_ranks(1, [&](comm::World& world) {
    DistributedDataParallel<Oddball> model(make<Oddball>(), world);
    const Mesh sizes{2, 3, 1};
    const auto draws_at = [&](const Mesh& at) {
      torch::manual_seed(static_cast<uint64_t>(100 * at.pipeline + 10 * at.data));
      return torch::randn({4});
    };
    const json saved = saving::merged_generators(ranks_of(sizes, [&](const Mesh& at) {
      draws_at(at);
      return saving::own_generators(model).at("states");
    }));
    for (int data = 0; data < 2; ++data) {
      for (int pipeline = 0; pipeline < 3; ++pipeline) {
        draws_at({data, pipeline, 0});
        const torch::Tensor next = torch::randn({4});
        torch::manual_seed(1);
        // Another tensor-parallel group of the same places draws alike.
        const Mesh more{2, 3, 4};
        saving::set_generators(saved, own_at({data, pipeline, 3}, more, json::object()), model);
        EXPECT_TRUE(torch::equal(torch::randn({4}), next)) << data << ", " << pipeline;
      }
    }
  });
}

TEST(SavedGeneratorsTest, StayWhereTheStateHasOtherPlaces) {
  const auto reason = [](const std::vector<json>& saved, const std::vector<json>& now) {
    return saving::reason_to_stay(saving::merged_generators(saved), now);
  };
  EXPECT_THAT(reason(seeded_apart({2, 2, 2}), seeded_apart({2, 2, 1})), IsEmpty());
  EXPECT_THAT(reason(seeded_apart({1, 2, 1}), all_alike({1, 1, 2})),
              HasSubstr("of 2 ranks along \"pipeline\"; those of these 1 stay"));
  EXPECT_THAT(reason(seeded_apart({3, 1, 1}), seeded_apart({2, 1, 1})),
              HasSubstr("of 3 ranks along \"data\"; those of these 2 stay"));
  EXPECT_THAT(reason(all_alike({}), seeded_apart({2, 1, 1})),
              HasSubstr("one generator of random numbers for all ranks along \"data\"; these 2 "
                        "were seeded apart"));
  EXPECT_THAT(reason(all_alike({}), all_alike({2, 2, 2})), IsEmpty());
}

TEST(SavedGeneratorsTest, OfADamagedManifestAreRefused) {
  const json damaged = {{"axes", {{"data", 2}}}, {"states", {seeded_by(0)}}};
  EXPECT_THAT(error_of([&] {
                saving::reason_to_stay(damaged, all_alike({2, 1, 1}));
              }),
              HasSubstr("expected 2 states for axes {\"data\":2}, got 1"));
}

}  // namespace
}  // namespace zeropage::saved_generators_test
