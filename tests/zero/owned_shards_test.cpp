#include "zeropage/owned_shards.h"

#include <fstream>
#include <functional>
#include <map>
#include <numeric>
#include <sstream>

#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/restarts.h"
#include "tests/harness/tiny_models.h"
#include "tests/zero/documented_shards.h"
#include "zeropage/simulation.h"
#include "zeropage/zeropage.h"

namespace zeropage::owned_shards_test {
namespace {

using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

// A way to keep and update parameters.
struct Way {
  const char* name;
  int stage;
  std::function<void(Options&, const std::string& folder)> set;
};

std::vector<Way> ways() {
  const auto plain = [](Options&, const std::string&) {};
  const auto bf16 = [](LowPrecisionUpdate update) {
    return [update](Options& options, const std::string&) {
      options.compute_dtype = torch::kBFloat16;
      options.low_precision_update = update;
    };
  };
  const auto away = [](Tier optimizer, Tier parameters) {
    return [=](Options& options, const std::string& folder) {
      options.compute_dtype = torch::kBFloat16;
      options.offload.optimizer = optimizer;
      options.offload.parameters = parameters;
      if (optimizer == Tier::kNvme) options.offload.nvme_directory = folder;
    };
  };
  return {{"stage 0", 0, plain},
          {"stage 1", 1, plain},
          {"stage 2", 2, plain},
          {"stage 3", 3, plain},
          {"stage 3, small pages whole", 3,
           [](Options& options, const std::string&) { options.minimum_sharded_bytes = 1024; }},
          {"stage 1, by the class", 1,
           [](Options& options, const std::string&) { options.update_by = UpdateBy::kClass; }},
          {"stage 0, masters", 0, bf16(LowPrecisionUpdate::kMasterWeights)},
          {"stage 2, masters", 2, bf16(LowPrecisionUpdate::kMasterWeights)},
          {"stage 3, split masters", 3, bf16(LowPrecisionUpdate::kSplitMasterWeights)},
          {"stage 3, no masters", 3, bf16(LowPrecisionUpdate::kNearest)},
          {"stage 1, optimizer on the host", 1, away(Tier::kHost, Tier::kDevice)},
          {"stage 3, all on NVMe", 3, away(Tier::kNvme, Tier::kNvme)}};
}

// Oddball and its optimizer on one of some ranks, of which all see the same samples.
struct Trained {
  Trained(World& world, const Way& way, const std::string& folder = {})
      : model(make<Oddball>(), world, options(way, folder)), optimizer(model, AdamWOptions(0.01)) {}

  static Options options(const Way& way, const std::string& folder) {
    Options options;
    options.stage = stage_of(way.stage);
    options.page_bytes = 4096;
    way.set(options, folder);
    return options;
  }

  void backward(int step) {
    const Samples samples = samples_of(0, step);
    optimizer.zero_grad();
    loss_of(model(samples.inputs).to(torch::kFloat), samples).backward();
  }
  void train(int first, int end) {
    for (int step = first; step < end; ++step) {
      backward(step);
      optimizer.step();
    }
  }

  DistributedDataParallel<Oddball> model;
  Optimizer<AdamW> optimizer;
};

// A dense tensor's elements as they lie in memory.
torch::Tensor in_memory_order(const torch::Tensor& dense) {
  return dense.detach().as_strided({dense.numel()}, {1}).clone();
}

// The whole values of each parameter, by its first name.
std::map<std::string, torch::Tensor> whole_parameters(Trained& run) {
  const GatheredParameters guard(run.model);
  std::map<std::string, torch::Tensor> whole;
  for (const auto& item : run.model.named_parameters()) {
    if (item.key() != "last.weight") whole[item.key()] = in_memory_order(item.value());
  }
  return whole;
}

std::map<std::string, torch::Tensor> exact_shards(Trained& run) {
  std::map<std::string, torch::Tensor> exact;
  visit_owned_shards(run.model,
                     [&](const OwnedShard& shard) { exact[shard.name] = shard.exact.clone(); });
  return exact;
}

std::vector<torch::Tensor> values_of(const std::map<std::string, torch::Tensor>& by_name) {
  std::vector<torch::Tensor> values;
  for (const auto& [name, tensor] : by_name) values.push_back(tensor);
  return values;
}

TEST(OwnedShardsTest, TogetherAreTheParametersEachElementOnce) {
  const DiskFolder folder;
  for (const Way& way : ways()) {
    for (const int ranks : {1, 3}) {
      SCOPED_TRACE(::testing::Message() << way.name << ", " << ranks << " ranks");
      run_ranks(ranks, [&](World& world) {
        Trained run(world, way, folder.path());
        run.train(0, 2);
        const auto whole = whole_parameters(run);
        std::vector<std::string> names;
        visit_owned_shards(run.model, [&](const OwnedShard& shard) {
          names.push_back(shard.name);
          const torch::Tensor& all = whole.at(shard.name);
          EXPECT_EQ(shard.values.dim(), 1);
          EXPECT_EQ(shard.values.numel(), shard.range.numel());
          EXPECT_EQ(shard.values.scalar_type(), all.scalar_type());
          EXPECT_TRUE(torch::equal(shard.values, all.slice(0, shard.range.begin, shard.range.end)))
              << shard.name;
          EXPECT_TRUE(torch::equal(shard.exact.to(all.scalar_type()), shard.values)) << shard.name;
          EXPECT_FALSE(shard.gradient.defined() && shard.gradient.numel() != shard.range.numel());
          const double owners = way.stage == 0 ? world.size() : 1;
          EXPECT_EQ(world.sum(static_cast<double>(shard.range.numel())),
                    owners * static_cast<double>(all.numel()))
              << shard.name;
        });
        EXPECT_EQ(names.size(), whole.size()) << "a tied one once";
      });
    }
  }
}

TEST(OwnedShardsTest, OneParameterIsReadAsWithTheOthersAndIsACopy) {
  const DiskFolder folder;
  for (const Way& way : ways()) {
    SCOPED_TRACE(way.name);
    run_ranks(2, [&](World& world) {
      Trained run(world, way, folder.path());
      run.train(0, 2);
      std::map<std::string, OwnedShard> visited;
      visit_owned_shards(run.model, run.optimizer, [&](const OwnedShard& shard) {
        OwnedShard& copy = visited[shard.name] = shard;
        copy.values = shard.values.clone();
        copy.exact = shard.exact.clone();
        for (auto& [name, state] : copy.states) state = state.clone();
      });
      for (const auto& item : run.model.named_parameters()) {
        const OwnedShard one = owned_shard(run.model, run.optimizer, item.value());
        const OwnedShard& same = visited.at(one.name);
        EXPECT_EQ(one.range, same.range);
        EXPECT_TRUE(torch::equal(one.values, same.values));
        EXPECT_TRUE(torch::equal(one.exact, same.exact));
        EXPECT_EQ(one.steps, same.steps);
        ASSERT_EQ(one.states.size(), same.states.size());
        for (const auto& [name, state] : one.states) {
          EXPECT_TRUE(torch::equal(state, same.states.at(name))) << one.name << " " << name;
        }
      }
      const OwnedShard before = owned_shard(run.model, run.model->first->weight);
      const torch::Tensor values = before.values.clone();
      EXPECT_TRUE(before.states.empty());
      run.train(2, 3);
      EXPECT_TRUE(torch::equal(before.values, values));
    });
  }
}

// What a run at stage 0 on one rank has, whole.
template <typename Visit>
void visit_alone(const Visit& visit) {
  run_ranks(1, [&](World& world) {
    Trained run(world, ways().front());
    run.train(0, 2);
    run.backward(2);
    visit_owned_shards(run.model, run.optimizer, visit);
  });
}

TEST(OwnedShardsTest, HaveTheMeanGradientAndTheStatesOfTheirElements) {
  std::map<std::string, OwnedShard> whole;
  visit_alone([&](const OwnedShard& shard) {
    OwnedShard& copy = whole[shard.name] = shard;
    if (shard.gradient.defined()) copy.gradient = shard.gradient.clone();
    for (auto& [name, state] : copy.states) state = state.clone();
  });
  EXPECT_EQ(whole.at("first.weight").steps, 2);
  EXPECT_EQ(whole.at("first.weight").states.size(), 2U);
  EXPECT_TRUE(whole.at("frozen.weight").states.empty());
  EXPECT_FALSE(whole.at("frozen.weight").gradient.defined());
  EXPECT_FALSE(whole.at("unused.weight").gradient.defined());
  for (const Way& way : {ways()[1], ways()[2], ways()[3]}) {
    SCOPED_TRACE(way.name);
    run_ranks(2, [&](World& world) {
      Trained run(world, way);
      run.train(0, 2);
      run.backward(2);
      visit_owned_shards(run.model, run.optimizer, [&](const OwnedShard& shard) {
        const OwnedShard& all = whole.at(shard.name);
        const auto part = [&](const torch::Tensor& of) {
          return of.slice(0, shard.range.begin, shard.range.end);
        };
        if (shard.range.empty()) return;
        ASSERT_EQ(shard.gradient.defined(), all.gradient.defined()) << shard.name;
        if (all.gradient.defined()) {
          EXPECT_TRUE(torch::equal(shard.gradient, part(all.gradient))) << shard.name;
        }
        EXPECT_EQ(shard.steps, all.steps) << shard.name;
        ASSERT_EQ(shard.states.size(), all.states.size()) << shard.name;
        for (const auto& [name, state] : shard.states) {
          EXPECT_TRUE(torch::equal(state, part(all.states.at(name)))) << shard.name << " " << name;
        }
      });
      run.optimizer.step();
      run.optimizer.zero_grad();
      visit_owned_shards(run.model, [](const OwnedShard& shard) {
        EXPECT_FALSE(shard.gradient.defined()) << shard.name;
      });
    });
  }
}

TEST(OwnedShardsTest, HaveWhatWasWrittenToParametersAndGradientsSince) {
  for (const Way& way : ways()) {
    if (way.stage == 0 || way.name == std::string("stage 3, all on NVMe")) continue;
    SCOPED_TRACE(way.name);
    run_ranks(2, [&](World& world) {
      Trained run(world, way);
      run.backward(0);
      {
        const torch::NoGradGuard no_grad;
        run.model->first->weight.fill_(0.5);
        run.model->first->weight.grad().mul_(0).add_(0.25);
      }
      const OwnedShard shard = owned_shard(run.model, run.model->first->weight);
      EXPECT_TRUE(shard.values.eq(0.5).all().item<bool>());
      // Split masters keep the lower bits that they had.
      EXPECT_TRUE(shard.exact.to(shard.values.scalar_type()).eq(0.5).all().item<bool>());
      EXPECT_TRUE(shard.gradient.eq(0.25).all().item<bool>());
    });
  }
}

TEST(OwnedShardsTest, CannotBeWrittenTo) {
  for (const Way& way : ways()) {
    if (way.stage == 0 || way.name == std::string("stage 3, all on NVMe")) continue;
    SCOPED_TRACE(way.name);
    run_ranks(2, [&](World& world) {
      Trained run(world, way);
      run.train(0, 1);
      run.backward(1);
      const auto before = values_of(whole_parameters(run));
      const auto refuses = [](const torch::Tensor& tensor) {
        EXPECT_THAT(error_of([&] { torch::Tensor(tensor).add_(1); }),
                    HasSubstr("Inplace update to inference tensor outside InferenceMode"));
      };
      const auto refuses_all = [&](const OwnedShard& shard) {
        refuses(shard.values);
        refuses(shard.exact);
        if (shard.gradient.defined()) refuses(shard.gradient);
        for (const auto& [name, state] : shard.states) refuses(state);
      };
      visit_owned_shards(run.model, run.optimizer, refuses_all);
      refuses_all(owned_shard(run.model, run.optimizer, run.model->first->weight));
      {
        // LibTorch allows it here.
        const c10::InferenceMode inference;
        visit_owned_shards(run.model, [](const OwnedShard& shard) {
          torch::Tensor(shard.values).add_(1);
          torch::Tensor(shard.exact).add_(1);
        });
      }
      EXPECT_TRUE(same_bits(values_of(whole_parameters(run)), before));
    });
  }
}

TEST(OwnedShardsTest, OneRankAloneMayReadItsOwn) {
  for (const int stage : {1, 3}) {
    run_ranks(2, [&](World& world) {
      Trained run(world, ways()[static_cast<size_t>(stage)]);
      run.train(0, 2);
      if (world.rank() == 0) {
        EXPECT_GT(owned_shard(run.model, run.model->first->weight).range.numel(), 0);
      }
      {
        // Pages that are resident stay so.
        const torch::NoGradGuard no_grad;
        run.model(samples_of(0, 0).inputs);
        if (world.rank() == 1) visit_owned_shards(run.model, [](const OwnedShard&) {});
        run.model(samples_of(0, 0).inputs);
      }
      run.train(2, 3);
    });
  }
}

TEST(OwnedShardsTest, NewValuesAreThoseOfMastersAndParametersOnAllRanks) {
  const DiskFolder folder;
  for (const Way& way : ways()) {
    SCOPED_TRACE(way.name);
    run_ranks(2, [&](World& world) {
      Trained run(world, way, folder.path());
      run.train(0, 2);
      const auto before = exact_shards(run);
      const auto whole_before = whole_parameters(run);
      // Too little for bf16 to show: the masters alone have it.
      const auto changed = [](const torch::Tensor& exact) {
        return exact.to(torch::kFloat).mul(1 + 1e-5);
      };
      assign_owned_shards(run.model, [&](const OwnedShard& shard) {
        if (shard.name == "unused.bias") return torch::Tensor();
        return changed(shard.exact);
      });
      visit_owned_shards(run.model, [&](const OwnedShard& shard) {
        const torch::Tensor& old = before.at(shard.name);
        const torch::Tensor expected = shard.name == "unused.bias" ? old : changed(old);
        EXPECT_TRUE(torch::equal(shard.exact, expected.to(shard.exact.scalar_type())))
            << shard.name;
      });
      const auto whole = whole_parameters(run);
      for (const auto& [name, values] : whole) {
        EXPECT_NEAR(values.to(torch::kDouble).sum().item<double>(),
                    whole_before.at(name).to(torch::kDouble).sum().item<double>(), 1e-1);
        visit_owned_shards(run.model, [&](const OwnedShard& shard) {
          if (shard.name != name) return;
          EXPECT_TRUE(
              torch::equal(values.slice(0, shard.range.begin, shard.range.end), shard.values));
        });
      }
      EXPECT_TRUE(same_bits(values_of(whole), values_of(whole_parameters(run))));
      run.train(2, 3);
    });
  }
}

TEST(OwnedShardsTest, TrainingGoesOnFromNewValuesAsFromWrittenOnes) {
  for (const Way& way : {ways()[0], ways()[1], ways()[2], ways()[3]}) {
    SCOPED_TRACE(way.name);
    run_ranks(2, [&](World& world) {
      Trained written(world, way), assigned(world, way);
      written.train(0, 2);
      assigned.train(0, 2);
      {
        const torch::NoGradGuard no_grad;
        const GatheredParameters guard(written.model, Modified::on_every_rank());
        for (torch::Tensor parameter : distinct_parameters(written.model.module())) {
          parameter.mul_(0.5);
        }
      }
      assign_owned_shards(assigned.model,
                          [](const OwnedShard& shard) { return shard.exact.mul(0.5); });
      written.train(2, 4);
      assigned.train(2, 4);
      EXPECT_TRUE(
          same_bits(values_of(whole_parameters(written)), values_of(whole_parameters(assigned))));
    });
  }
}

TEST(OwnedShardsTest, WhereOneRankGivesNoValuesNothingIsChangedAndAllAreTold) {
  for (const int stage : {1, 3}) {
    std::vector<std::vector<torch::Tensor>> before(2), after(2);
    const auto tell = [&](const NewShardValues& on_rank_one) {
      std::vector<std::string> said(2);
      run_ranks(2, [&](World& world) {
        const auto rank = static_cast<size_t>(world.rank());
        Trained run(world, ways()[static_cast<size_t>(stage)]);
        run.train(0, 1);
        before[rank] = values_of(whole_parameters(run));
        said[rank] = error_of([&] {
          assign_owned_shards(run.model, [&](const OwnedShard& shard) {
            return rank == 1 ? on_rank_one(shard) : shard.exact.mul(2);
          });
        });
        after[rank] = values_of(whole_parameters(run));
      });
      EXPECT_TRUE(same_bits(before[0], after[0]));
      EXPECT_TRUE(same_bits(before[1], after[1]));
      return said;
    };
    const auto of_sizes =
        tell([](const OwnedShard& shard) { return torch::ones({shard.range.numel() + 1}); });
    EXPECT_THAT(of_sizes[1], HasSubstr("expected new values of sizes ["));
    EXPECT_THAT(of_sizes[0], AllOf(HasSubstr("nothing was assigned, as rank 1 said"),
                                   HasSubstr("expected new values of sizes [")));
    const auto of_kind = tell(
        [](const OwnedShard& shard) { return torch::ones({shard.range.numel()}, torch::kLong); });
    EXPECT_THAT(of_kind[0], HasSubstr("of floating point"));
    const auto thrown = tell([](const OwnedShard&) -> torch::Tensor {
      throw std::runtime_error("no average of this one");
    });
    EXPECT_EQ(thrown[1], "no average of this one");
    EXPECT_THAT(thrown[0], HasSubstr("rank 1 said: no average of this one"));
  }
}

// Each of two ranks owns all of a parameter at stage 0, and with shards within two of four ranks there are two of each.
TEST(OwnedShardsTest, RanksThatOwnTheSameAndAssignOtherValuesAreNamed) {
  const Way hybrid{"", 1, [](Options& options, const std::string&) { options.shard_within = 2; }};
  for (const auto& [way, ranks] : {std::pair{ways()[0], 2}, std::pair{hybrid, 4}}) {
    const auto assign = [&way, ranks](double on_last_rank, torch::ScalarType dtype) {
      std::vector<std::string> said(static_cast<size_t>(ranks));
      run_ranks(ranks, [&](World& world) {
        const bool is_last = world.rank() == world.size() - 1;
        Trained run(world, way);
        run.train(0, 1);
        const auto before = values_of(whole_parameters(run));
        const std::string words = error_of([&] {
          assign_owned_shards(run.model, [&](const OwnedShard& shard) -> torch::Tensor {
            if (shard.name.find("weight") == std::string::npos) return {};
            return is_last ? shard.exact.mul(on_last_rank).to(dtype) : shard.exact.mul(2);
          });
        });
        said[static_cast<size_t>(world.rank())] = words;
        EXPECT_EQ(same_bits(before, values_of(whole_parameters(run))), !words.empty());
      });
      return said;
    };
    for (const std::string& words : assign(3, torch::kFloat)) {
      EXPECT_THAT(words, AllOf(HasSubstr("nothing was assigned"), HasSubstr("weight\""),
                               HasSubstr(c10::str("on rank ", ranks == 2 ? 0 : 1, " and ")),
                               HasSubstr(c10::str("on rank ", ranks - 1))));
    }
    for (const std::string& words : assign(2, torch::kDouble)) EXPECT_EQ(words, "");
  }
}

TEST(OwnedShardsTest, ARankThatAssignsAloneIsNamed) {
  const auto errors = try_ranks(2, [](World& world) {
    Trained run(world, ways()[3]);
    if (world.rank() == 0) {
      assign_owned_shards(run.model, [](const OwnedShard& shard) { return shard.exact.mul(2); });
    } else {
      run.train(0, 1);
    }
  });
  EXPECT_THAT(message_of(errors[0]), HasSubstr("assign_owned_shards()"));
  EXPECT_THAT(message_of(errors[1]), HasSubstr("assign_owned_shards()"));
}

TEST(OwnedShardsTest, WhatHasNoShardIsRefusedInWords) {
  run_ranks(2, [](World& world) {
    Trained run(world, ways()[3]), other(world, ways()[3]);
    EXPECT_THAT(error_of([&] { owned_shard(run.model, torch::ones({3})); }),
                HasSubstr("a tensor of sizes [3] is no parameter of the wrapped module"));
    EXPECT_THAT(error_of([&] { owned_shard(run.model, torch::Tensor()); }),
                HasSubstr("a tensor that is undefined is no parameter"));
    EXPECT_THAT(
        error_of([&] { visit_owned_shards(run.model, other.optimizer, [](const auto&) {}); }),
        HasSubstr("the optimizer is of another model"));
  });
  const auto simulated = World::simulated({.topology = comm::Topology::even(2, 2)});
  const DistributedDataParallel<torch::nn::Linear> model(
      DeferredModule<torch::nn::Linear>([] { return torch::nn::Linear(4, 4); }), simulated);
  EXPECT_THAT(error_of([&] { visit_owned_shards(model, [](const OwnedShard&) {}); }),
              HasSubstr("a simulated world has no values"));
}

TEST(OwnedShardsTest, WhileAStepIsUnderWayAreRefusedInWords) {
  const auto refuses = [](Trained& run, const char* words) {
    EXPECT_THAT(error_of([&] { owned_shard(run.model, run.model->first->weight); }),
                HasSubstr(words));
    EXPECT_THAT(error_of([&] { visit_owned_shards(run.model, [](const OwnedShard&) {}); }),
                HasSubstr(words));
    EXPECT_THAT(error_of([&] {
                  assign_owned_shards(run.model, [](const OwnedShard&) { return torch::Tensor(); });
                }),
                HasSubstr(words));
  };
  const auto stepping = [](StepWhen when) {
    return Way{"", 2, [when](Options& options, const std::string&) {
                 options.offload.optimizer = Tier::kHost;
                 options.offload.step = when;
               }};
  };
  run_ranks(2, [&](World& world) {
    Trained late(world, stepping(StepWhen::kOneStepLate));
    refuses(late, "kOneStepLate");
    Trained early(world, stepping(StepWhen::kInBackward));
    early.train(0, 1);
    EXPECT_GE(owned_shard(early.model, early.model->first->weight).range.numel(), 0);
    early.backward(1);
    refuses(early, "has begun the step of parameter");
    early.optimizer.step();
    EXPECT_GE(owned_shard(early.model, early.model->first->weight).range.numel(), 0);
  });
}

// ---- what docs/metrics_and_shards.md shows ----

TEST(DocumentedShardsTest, NormsAreCappedAtEveryStageAlike) {
  for (const int stage : {1, 2, 3}) {
    SCOPED_TRACE(stage);
    run_ranks(2, [&](World& world) {
      Trained run(world, ways()[static_cast<size_t>(stage)]);
      run.train(0, 1);
      const auto before = whole_parameters(run);
      documented::cap_norms(run.model, 2.0, nullptr);
      for (const auto& [name, after] : whole_parameters(run)) {
        const torch::Tensor& old = before.at(name);
        const double norm = old.to(torch::kDouble).norm().item<double>();
        EXPECT_TRUE(torch::allclose(after, norm > 2 ? old * (2 / norm) : old)) << name;
      }
    });
  }
}

// Between lines with `begin` and `end` in them.
std::string lines_between(const std::string& file, const std::string& begin,
                          const std::string& end) {
  std::ifstream in(std::string(ZEROPAGE_SOURCE_DIR) + "/" + file);
  std::string found;
  bool within = false;
  for (std::string line; std::getline(in, line);) {
    if (within && line.find(end) != std::string::npos) return found;
    if (within) found += line + "\n";
    within |= line.find(begin) != std::string::npos;
  }
  return found;
}

TEST(DocumentedShardsTest, TheDocumentedCodeIsTheTestedOne) {
  std::ifstream in(std::string(ZEROPAGE_SOURCE_DIR) + "/docs/metrics_and_shards.md");
  std::ostringstream page;
  page << in.rdbuf();
  const std::string code =
      lines_between("tests/zero/documented_shards.h", "// [documented]", "// [/documented]");
  ASSERT_GT(code.size(), 100U);
  EXPECT_THAT(page.str(), HasSubstr("```cpp\n" + code + "```\n"));
}

}  // namespace
}  // namespace zeropage::owned_shards_test
