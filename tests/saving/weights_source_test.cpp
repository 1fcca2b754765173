// Weights of any format, straight into what ranks own.
#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/restarts.h"
#include "tests/harness/small_states.h"
#include "zeropage/saving.h"

namespace zeropage::weights_source_test {
namespace {

using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

// Large enough that two ranks own some of it, with buffers of both kinds.
struct LayersImpl : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(33, 40));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(40));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(40, 50));
};
TORCH_MODULE(Layers);

// The tensors of a module, with other values, as a format of a program's own would have them. Counts what is read.
class CountedSource final : public WeightsSource {
 public:
  explicit CountedSource(const torch::nn::Module& module) {
    float value = 0;
    for (const auto& tensors : {module.named_parameters(), module.named_buffers()}) {
      for (const auto& item : tensors) {
        const torch::Tensor& of = item.value();
        values_.push_back(of.is_floating_point()
                              ? torch::arange(of.numel(), torch::kFloat) * 0.0137 + value++
                              : torch::arange(of.numel(), of.scalar_type()) + 7);
        tensors_.push_back({item.key(), of.sizes().vec(), values_.back().scalar_type()});
      }
    }
  }

  std::string name() const override { return "counted"; }
  const std::vector<Entry>& tensors() const override { return tensors_; }
  void read(const Entry& entry, int64_t first, const at::Tensor& to) override {
    if (entry.name == fails_at) throw std::runtime_error("the disk is gone");
    read_numel += to.numel();
    most_numel = std::max(most_numel, to.numel());
    to.copy_(values(entry).narrow(0, first, to.numel()));
  }

  // Flat.
  torch::Tensor values(const Entry& entry) const {
    return values_[static_cast<size_t>(&entry - tensors_.data())];
  }
  torch::Tensor values(const std::string& name) const {
    for (const Entry& entry : tensors_) {
      if (entry.name == name) return values(entry);
    }
    return {};
  }
  std::vector<Entry>& change() { return tensors_; }

  std::string fails_at;
  int64_t read_numel = 0;
  int64_t most_numel = 0;  // of one read

 private:
  std::vector<Entry> tensors_;
  std::vector<torch::Tensor> values_;
};

// Everything that the ranks own has the source's values, rounded to what is kept.
template <typename Model>
void expect_values(Model& model, const CountedSource& source) {
  visit_owned_shards(model, [&](const OwnedShard& shard) {
    const torch::Tensor whole = source.values(shard.name);
    ASSERT_TRUE(whole.defined()) << shard.name;
    const torch::Tensor expected = whole.slice(0, shard.range.begin, shard.range.end);
    EXPECT_TRUE(torch::equal(shard.values, expected.to(shard.values.scalar_type()))) << shard.name;
    EXPECT_TRUE(torch::equal(shard.exact, expected.to(shard.exact.scalar_type()))) << shard.name;
  });
  for (const auto& buffer : model.named_buffers()) {
    EXPECT_TRUE(torch::equal(buffer.value().flatten(),
                             source.values(buffer.key()).to(buffer.value().scalar_type())))
        << buffer.key();
  }
}

TEST(WeightsSourceTest, GivesEveryStageTierAndPrecisionItsValues) {
  const DiskFolder disk;
  Options low;
  low.compute_dtype = torch::kBFloat16;
  Options split = low;
  split.low_precision_update = LowPrecisionUpdate::kSplitMasterWeights;
  Options on_host;
  on_host.offload.optimizer = Tier::kHost;
  Options on_nvme;
  on_nvme.offload.optimizer = Tier::kNvme;
  on_nvme.offload.parameters = Tier::kNvme;
  on_nvme.offload.nvme_directory = disk.path();
  for (const Options& options : {Options(), low, split, on_host, on_nvme}) {
    for (const int stage : {0, 1, 2, 3}) {
      if (options.offload.parameters != Tier::kDevice && stage != 3) continue;
      SCOPED_TRACE(::testing::Message() << "stage " << stage);
      run_ranks(2, [&](World& world) {
        auto module = make<Layers>();
        CountedSource source(*module);
        DistributedDataParallel<Layers> model(module, world, Setting{stage, 2, options}.all());
        const LoadReport report = load_weights(source, model);
        EXPECT_THAT(report.missing, IsEmpty());
        EXPECT_THAT(report.unexpected, IsEmpty());
        expect_values(model, source);
        // Whole pages have the other ranks' part too.
        const GatheredParameters guard(model);
        for (const auto& item : model.named_parameters()) {
          EXPECT_TRUE(torch::equal(item.value().flatten(),
                                   source.values(item.key()).to(item.value().scalar_type())));
        }
      });
    }
  }
}

TEST(WeightsSourceTest, IsReadByEachRankForWhatItOwnsOfAModuleThatNeverHadMemory) {
  constexpr int64_t kWidth = 1024;
  run_ranks(4, [&](World& world) {
    const auto make_linear = [] {
      return torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false));
    };
    CountedSource source(*make_linear());
    DeferredModule<torch::nn::Linear> deferred(make_linear);
    Options options;
    options.compute_dtype = torch::kBFloat16;  // so that values are converted, by pieces
    DistributedDataParallel<torch::nn::Linear> model(std::move(deferred), world,
                                                     Setting{3, 4, options}.all());
    load_weights(source, model);
    expect_values(model, source);
    // The parameters' values, and those of their master weights.
    EXPECT_EQ(source.read_numel, 2 * kWidth * kWidth / 4);
    EXPECT_LE(source.most_numel, 1 << 18);
  });
}

TEST(WeightsSourceTest, ThatDoesNotFitIsOneErrorWithAllNamesAndNothingChanges) {
  for (const int stage : {0, 3}) {
    SCOPED_TRACE(stage);
    run_ranks(2, [&](World& world) {
      auto module = make<Layers>();
      CountedSource source(*module);
      DistributedDataParallel<Layers> model(module, world, Setting{stage, 2}.all());
      const auto before = full_state(model);
      std::vector<WeightsSource::Entry>& entries = source.change();
      entries[0].name = "stem.weight";
      entries[1].sizes = {3, 2};
      const std::string error = error_of([&] { load_weights(source, model); });
      EXPECT_THAT(error, AllOf(HasSubstr("counted: the weights are of another module"),
                               HasSubstr("1 missing in it: first.weight"),
                               HasSubstr("1 unexpected: stem.weight"),
                               HasSubstr("first.bias (expected Float [40], got Float [3, 2])")));
      EXPECT_THAT(error_of([&] { load_weights(source, model, {.strict = false}); }),
                  HasSubstr("first.bias (expected Float [40], got Float [3, 2])"));
      const auto after = full_state(model);
      for (const auto& item : before) EXPECT_TRUE(torch::equal(item.value(), after[item.key()]));

      entries[1].sizes = {40};
      const LoadReport report = load_weights(source, model, {.strict = false});
      EXPECT_THAT(report.missing, ElementsAre("first.weight"));
      EXPECT_THAT(report.unexpected, ElementsAre("stem.weight"));
      const auto loaded = full_state(model);
      if (world.rank() != 0) return;
      EXPECT_TRUE(torch::equal(loaded["first.weight"], before["first.weight"]));
      EXPECT_TRUE(torch::equal(loaded["first.bias"], source.values("first.bias")));
    });
  }
}

TEST(WeightsSourceTest, ThatOneRankCannotReadOrHasOtherwiseThrowsOnAllRanks) {
  run_ranks(2, [&](World& world) {
    auto module = make<Layers>();
    CountedSource source(*module);
    DistributedDataParallel<Layers> model(module, world, Setting{3, 2}.all());
    if (world.rank() == 1) source.change()[0].dtype = torch::kDouble;
    EXPECT_THAT(error_of([&] { load_weights(source, model); }),
                HasSubstr("rank 1 has other tensors than rank 0 in its source"));
    source.change()[0].dtype = torch::kFloat;
    if (world.rank() == 1) source.fails_at = "last.weight";
    EXPECT_THAT(error_of([&] { load_weights(source, model); }),
                AllOf(HasSubstr("rank 1: the disk is gone"), HasSubstr("half loaded")));
    source.fails_at.clear();
    load_weights(source, model);
    expect_values(model, source);
  });
}

TEST(WeightsSourceTest, GivesAPlainModuleItsValues) {
  auto module = make<Layers>();
  CountedSource source(*module);
  load_weights(source, *module);
  for (const auto& item : module->named_parameters()) {
    EXPECT_TRUE(torch::equal(item.value().flatten(), source.values(item.key())));
  }
}

TEST(WeightsSourceTest, OfFilesGoesIntoAWrappedModuleByThePath) {
  const DiskFolder disk;
  const SmallTensor weight = {"weight", {2, 3}, bytes_of_values<float>({1, 2, 3, 4, 5, 6})};
  const SmallTensor bias = {"bias", {2}, bytes_of_values<float>({7, 8})};
  put_bytes(disk.path() + "/all.safetensors", safetensors_bytes({weight, bias}));
  put_bytes(disk.path() + "/1.safetensors", safetensors_bytes({bias}));
  put_bytes(disk.path() + "/2.safetensors", safetensors_bytes({weight}));
  put_bytes(disk.path() + "/model.safetensors.index.json",
            R"({"weight_map": {"weight": "2.safetensors", "bias": "1.safetensors"}})");
  for (const char* name : {"/all.safetensors", "/model.safetensors.index.json"}) {
    for (const int stage : {0, 1, 3}) {
      SCOPED_TRACE(::testing::Message() << name << " stage " << stage);
      run_ranks(2, [&](World& world) {
        DistributedDataParallel<torch::nn::Linear> model(torch::nn::Linear(3, 2), world,
                                                         Setting{stage, 2}.all());
        load_weights(disk.path() + name, model);
        EXPECT_TRUE(torch::equal(model(torch::ones({1, 3})), torch::tensor({{13.0F, 23.0F}})));
        EXPECT_THAT(error_of([&] { load_weights(disk.path() + "/nothing.safetensors", model); }),
                    HasSubstr("nothing.safetensors"));
      });
    }
  }
}

}  // namespace
}  // namespace zeropage::weights_source_test
