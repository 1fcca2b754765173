// What Zeropage does for a module of many parameters grows with their number, and not with its square.
//
// Counted are the basic blocks of Zeropage's own code that this thread runs, by the calls that the compiler puts
// into each (-fsanitize-coverage=trace-pc-guard): no time is measured, and LibTorch is not counted. So a loop over
// all parameters in what is done for each of them shows, wherever it is.
#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include "zeropage/zeropage.h"

namespace zeropage::linear_work_test {
namespace {

thread_local int64_t blocks_of_thread = 0;

}  // namespace
}  // namespace zeropage::linear_work_test

// The compiler's calls. A guard that is not 0 belongs to a block that is counted.
extern "C" void __sanitizer_cov_trace_pc_guard_init(uint32_t* begin, uint32_t* end) {
  for (uint32_t* guard = begin; guard != end; ++guard) *guard = 1;
}
extern "C" void __sanitizer_cov_trace_pc_guard(uint32_t* /*guard*/) {
  ++zeropage::linear_work_test::blocks_of_thread;
}

namespace zeropage::linear_work_test {
namespace {

using memory::operator""_KiB;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;

// Twice as many from one to the next.
constexpr std::array<int64_t, 3> kTensors = {128, 256, 512};
// What twice as many parameters may add, in what half of them added: 2 where work is linear, some more where
// something is sorted or a table grows, and 4 where it is quadratic.
constexpr double kMostGrowth = 2.7;
// Blocks a parameter below which a part does the same for any number of them.
constexpr int64_t kFewBlocks = 4;
constexpr int64_t kNumel = 4;

struct ManyParametersImpl : torch::nn::Module {
  explicit ManyParametersImpl(int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      register_parameter("weight" + std::to_string(i), torch::ones({kNumel}));
      register_buffer("mean" + std::to_string(i), torch::ones({1}));
    }
  }
  // Every second one, or all.
  torch::Tensor forward(bool all) const {
    std::vector<torch::Tensor> sums;
    bool is_used = true;
    for (const torch::Tensor& parameter : parameters()) {
      if (is_used) sums.push_back(parameter.sum());
      is_used = all || !is_used;
    }
    return torch::stack(sums).sum();
  }
};
TORCH_MODULE(ManyParameters);

struct Setting {
  std::string name;
  std::function<void(Options&)> change = [](Options&) {};
  int64_t groups = 1;
  bool is_deferred = false;
  bool accumulates = false;
  bool uses_half = false;
  bool makes_steps_in_backward = false;
};

void PrintTo(const Setting& setting, std::ostream* out) {
  *out << setting.name;
}

std::vector<Setting> all_settings() {
  const auto small_pages = [](Options& options) { options.page_bytes = 4_KiB; };
  const auto stage = [](int number) {
    return [number](Options& options) { options.stage = stage_of(number); };
  };
  const auto both = [](const auto& one, const auto& other) {
    return [one, other](Options& options) {
      one(options);
      other(options);
    };
  };
  const auto on_host = [](Options& options) { options.offload.optimizer = memory::Tier::kHost; };
  const auto in_backward = [](Options& options) {
    options.offload.optimizer = memory::Tier::kHost;
    options.offload.step = StepWhen::kInBackward;
  };
  std::vector<Setting> settings;
  for (const int number : {0, 1, 2, 3}) {
    const std::string name = "Stage" + std::to_string(number);
    settings.push_back({.name = name, .change = stage(number)});
    settings.push_back({.name = name + "SmallPages", .change = both(stage(number), small_pages)});
    settings.push_back(
        {.name = name + "Accumulated", .change = stage(number), .accumulates = true});
    settings.push_back(
        {.name = name + "HalfUsed", .change = both(stage(number), small_pages), .uses_half = true});
  }
  settings.push_back({.name = "Deferred", .change = stage(3), .is_deferred = true});
  settings.push_back({.name = "TwoGroups", .change = stage(2), .groups = 2});
  settings.push_back(
      {.name = "AGroupEach", .change = both(stage(2), small_pages), .groups = kTensors.back()});
  settings.push_back({.name = "ByTheClass",
                      .change = [](Options& options) { options.update_by = UpdateBy::kClass; }});
  settings.push_back({.name = "InBf16", .change = [](Options& options) {
                        options.stage = Stage::kParameters;
                        options.compute_dtype = at::kBFloat16;
                      }});
  settings.push_back({.name = "StatesInBf16", .change = [](Options& options) {
                        options.optimizer_state = StateFormat::kBf16;
                      }});
  settings.push_back({.name = "RoundedAtRandom", .change = [](Options& options) {
                        options.compute_dtype = at::kBFloat16;
                        options.low_precision_update = LowPrecisionUpdate::kStochasticRounding;
                      }});
  settings.push_back({.name = "OffloadedSmallPages", .change = both(on_host, small_pages)});
  settings.push_back({.name = "OffloadedInBackwardSmallPages",
                      .change = both(in_backward, small_pages),
                      .makes_steps_in_backward = true});
  return settings;
}

// Blocks by what was done.
class Work {
 public:
  template <typename Part>
  auto count(const std::string& name, Part part) {
    const int64_t before = blocks_of_thread;
    if constexpr (std::is_void_v<decltype(part())>) {
      part();
      of_part_[name] += blocks_of_thread - before;
    } else {
      auto made = part();
      of_part_[name] += blocks_of_thread - before;
      return made;
    }
  }
  const std::map<std::string, int64_t>& of_part() const { return of_part_; }

 private:
  std::map<std::string, int64_t> of_part_;
};

using Model = DistributedDataParallel<ManyParameters>;

std::unique_ptr<Model> wrapped(const Setting& setting, comm::World& world, int64_t count) {
  Options options;
  setting.change(options);
  if (!setting.is_deferred) {
    return std::make_unique<Model>(ManyParameters(count), world, options);
  }
  return std::make_unique<Model>(
      DeferredModule<ManyParameters>([count] { return ManyParameters(count); }), world, options);
}

// Parameter i is in group i modulo their number.
std::vector<OptimizerParamGroup> groups_of(const Model& model, int64_t groups) {
  const std::vector<torch::Tensor> parameters = model.parameters();
  std::vector<std::vector<torch::Tensor>> tensors(
      std::min(static_cast<size_t>(groups), parameters.size()));
  for (size_t i = 0; i < parameters.size(); ++i) {
    tensors[i % tensors.size()].push_back(parameters[i]);
  }
  std::vector<OptimizerParamGroup> made;
  for (auto& of_group : tensors) {
    made.emplace_back(std::move(of_group), std::make_unique<AdamWOptions>(1e-3));
  }
  return made;
}

void train(Work& work, const Setting& setting, Model& model, Optimizer<AdamW>& optimizer) {
  std::optional<Accumulator> accumulator;
  if (setting.accumulates) accumulator.emplace(model, AccumulatorOptions{.micro_steps = 2});
  for (int step = 0; step < 3; ++step) {
    for (int micro_step = 0; micro_step < (setting.accumulates ? 2 : 1); ++micro_step) {
      const auto loss = work.count("forward", [&] { return model(!setting.uses_half); });
      work.count("backward", [&] { accumulator ? accumulator->backward(loss) : loss.backward(); });
    }
    if (!setting.makes_steps_in_backward && !accumulator) {
      work.count("norm", [&] { gradient_norm(model); });
    }
    work.count("step", [&] {
      if (accumulator) {
        accumulator->step(optimizer);
      } else {
        optimizer.step();
      }
    });
    const bool set_to_none = step % 2 == 0;
    work.count("zero_grad", [&] { optimizer.zero_grad(set_to_none); });
  }
}

void look_at(Work& work, Model& model, Optimizer<AdamW>& optimizer) {
  work.count("owned shards", [&] { visit_owned_shards(model, optimizer, [](const auto&) {}); });
  work.count("full state", [&] { full_state(model); });
  work.count("guard", [&] { const GatheredParameters guard(model, Modified::on_every_rank()); });
  work.count("average", [&] {
    WeightAverage average(model);
    average.update();
    average.swap_in();
    average.swap_out();
  });
  // The state is not put into the system's folder for temporary files itself: a save looks at what lies beside it.
  const auto folder = std::filesystem::temp_directory_path() /
                      ("zeropage-linear-work-" + std::to_string(::getpid()));
  work.count("saving", [&] { save_state(folder / "step", model, optimizer); });
  work.count("loading", [&] { load_state(folder / "step", model, optimizer); });
  std::filesystem::remove_all(folder);
}

Work work_of(const Setting& setting, int64_t count) {
  Work work;
  comm::World::threads(1, [&](comm::World& world) {
    const auto model = work.count("wrapping", [&] { return wrapped(setting, world, count); });
    const auto optimizer = work.count("optimizer", [&] {
      return std::make_unique<Optimizer<AdamW>>(*model, groups_of(*model, setting.groups));
    });
    train(work, setting, *model, *optimizer);
    look_at(work, *model, *optimizer);
  });
  return work;
}

class LinearWorkTest : public ::testing::TestWithParam<Setting> {};
INSTANTIATE_TEST_SUITE_P(Settings, LinearWorkTest, ::testing::ValuesIn(all_settings()),
                         [](const auto& info) { return info.param.name; });

TEST_P(LinearWorkTest, GrowsWithTheNumberOfParametersInEveryPart) {
  std::array<std::map<std::string, int64_t>, kTensors.size()> blocks;
  for (size_t i = 0; i < kTensors.size(); ++i) {
    blocks[i] = work_of(GetParam(), kTensors[i]).of_part();
  }
  ASSERT_GT(blocks.back().at("wrapping"), kTensors.back()) << "nothing was counted";
  for (const auto& [part, most] : blocks.back()) {
    const int64_t first = blocks[1].at(part) - blocks[0].at(part);
    const int64_t second = most - blocks[1].at(part);
    if (second < kFewBlocks * (kTensors[2] - kTensors[1])) continue;
    EXPECT_LE(static_cast<double>(second), kMostGrowth * static_cast<double>(first))
        << part << ": " << blocks[0].at(part) << ", " << blocks[1].at(part) << " and " << most
        << " blocks for " << kTensors[0] << ", " << kTensors[1] << " and " << kTensors[2]
        << " parameters";
  }
}

}  // namespace
}  // namespace zeropage::linear_work_test
