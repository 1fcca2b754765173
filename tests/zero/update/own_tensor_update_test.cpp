// Optimizers of a user's own that read whole tensors, as a program outside would write them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"
#include "zeropage/tensor_update.h"
#include "zeropage/zeropage.h"

namespace zeropage::own_tensor_update_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;
using memory::operator""_KiB;

struct LarsOptions : torch::optim::OptimizerCloneableOptions<LarsOptions> {
  LarsOptions(double lr = 0.1) : lr_(lr) {}
  TORCH_ARG(double, lr) = 0.1;
  TORCH_ARG(double, momentum) = 0.9;
  TORCH_ARG(double, weight_decay) = 1e-2;

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, momentum);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  }
  double get_lr() const override { return lr(); }
  void set_lr(double lr) override { this->lr(lr); }
};

// You et al. 2017, "Large batch training of convolutional networks", with the momentum of directions.
struct Lars : TensorUpdate<LarsOptions> {
  static constexpr auto kReads = UpdateReads::kSums;

  std::vector<std::string> states(const LarsOptions&) const override { return {"momentum_buffer"}; }
  void direct(const LarsOptions& options, const Elements& of) const override {
    of.states[0].mul_(options.momentum()).add_(of.gradient);
    of.directions.copy_(of.states[0]).add_(of.values, options.weight_decay());
  }
  double factor(const LarsOptions&, at::IntArrayRef, double of_values,
                double of_directions) const override {
    return of_values > 0 && of_directions > 0 ? of_values / of_directions : 1;
  }
  void descend(const LarsOptions& options, const at::Tensor& values,
               const at::Tensor& directions) const override {
    values.sub_(directions, options.lr());
  }
};

// Directions without what they have along the rows' mean: nonsense to a part of a matrix.
struct Centred : TensorUpdate<LarsOptions> {
  static constexpr auto kReads = UpdateReads::kMatrix;

  std::vector<std::string> states(const LarsOptions&) const override { return {}; }
  void direct(const LarsOptions&, const Elements& of) const override {
    of.directions.copy_(of.gradient);
  }
  void transform(const LarsOptions&, const at::Tensor& directions) const override {
    if (directions.dim() == 2) directions.sub_(directions.mean(0, /*keepdim=*/true));
  }
  void descend(const LarsOptions& options, const at::Tensor& values,
               const at::Tensor& directions) const override {
    values.sub_(directions, options.lr());
  }
  std::string objection_to(at::IntArrayRef sizes) const override {
    return sizes.size() > 3 ? ": has more than three dimensions; leave it out" : "";
  }
};

struct Run {
  int ranks = 1;
  int stage = 0;
  int first = 0;
  int end = 4;
  std::string load = {};
  std::string save = {};
  Options options = {};
};

template <typename A>
std::vector<torch::Tensor> trained(const Run& run) {
  std::vector<torch::Tensor> result;
  run_ranks(run.ranks, [&](comm::World& world) {
    Options options = run.options;
    options.stage = stage_of(run.stage);
    options.page_bytes = 4_KiB;
    static std::mutex mutex;
    std::unique_lock lock(mutex);
    torch::manual_seed(7);
    Oddball module;
    lock.unlock();
    DistributedDataParallel<Oddball> model(module, world, options);
    Optimizer<A> optimizer(model, LarsOptions(0.05));
    if (!run.load.empty()) load_state(run.load, model, optimizer);
    for (int step = run.first; step < run.end; ++step) {
      const Samples samples = samples_of(/*rank=*/0, step);
      optimizer.zero_grad();
      loss_of(model(samples.inputs).to(torch::kFloat), samples).backward();
      optimizer.step();
    }
    if (!run.save.empty()) save_state(run.save, model, optimizer);
    const auto state = full_state(model);
    if (world.rank() != 0) return;
    for (const auto& item : state) result.push_back(item.value());
  });
  return result;
}

template <typename A>
void expect_same_bits_everywhere() {
  at::set_num_threads(1);
  const auto expected = trained<A>({});
  EXPECT_FALSE(same_bits(expected, trained<A>({.end = 0})));
  for (const int ranks : {1, 2, 4}) {
    for (const int stage : {0, 1, 2, 3}) {
      EXPECT_TRUE(same_bits(expected, trained<A>({ranks, stage}))) << ranks << ", " << stage;
    }
  }
  const DiskFolder folder;
  const std::string path = folder.path() + "/state";
  trained<A>({.ranks = 4, .stage = 3, .end = 2, .save = path});
  EXPECT_TRUE(same_bits(expected, trained<A>({.ranks = 2, .stage = 1, .first = 2, .load = path})));
}

TEST(OwnTensorUpdateTest, OfSumsHasTheSameBitsEverywhere) {
  expect_same_bits_everywhere<Lars>();
}

TEST(OwnTensorUpdateTest, OfMatricesHasTheSameBitsEverywhere) {
  expect_same_bits_everywhere<Centred>();
}

TEST(OwnTensorUpdateTest, TakesMasterWeights) {
  Options options;
  options.compute_dtype = torch::kBFloat16;
  EXPECT_TRUE(same_bits(trained<Lars>({.options = options}),
                        trained<Lars>({.ranks = 2, .stage = 3, .options = options})));
}

// What it does wrong.
enum class Wrong { kResizesDirections, kReplacesMatrix, kNamesAlike, kReadsElements };

template <Wrong kWrong>
struct Mistaken : Centred {
  static constexpr auto kReads =
      kWrong == Wrong::kReadsElements ? UpdateReads::kElement : UpdateReads::kMatrix;

  std::vector<std::string> states(const LarsOptions&) const override {
    if (kWrong == Wrong::kNamesAlike) return {"average", "average"};
    return {};
  }
  void direct(const LarsOptions&, const Elements& of) const override {
    of.directions.copy_(of.gradient);
    if (kWrong == Wrong::kResizesDirections) of.directions.resize_({1});
  }
  void transform(const LarsOptions&, const at::Tensor& directions) const override {
    if (kWrong == Wrong::kReplacesMatrix)
      directions.unsafeGetTensorImpl()->set_sizes_contiguous({1});
  }
};

TEST(OwnTensorUpdateTest, ThatDoesItWronglyIsRefused) {
  EXPECT_THAT(error_of([] { trained<Mistaken<Wrong::kResizesDirections>>({}); }),
              HasSubstr("direct(): expected directions of sizes"));
  EXPECT_THAT(error_of([] { trained<Mistaken<Wrong::kReplacesMatrix>>({}); }),
              HasSubstr("transform(): expected directions of sizes"));
  EXPECT_THAT(error_of([] { trained<Mistaken<Wrong::kNamesAlike>>({}); }),
              HasSubstr("states(): expected names that differ"));
  EXPECT_THAT(error_of([] { trained<Mistaken<Wrong::kReadsElements>>({}); }),
              HasSubstr("expected UpdateReads::kSums or UpdateReads::kMatrix"));
}

TEST(OwnTensorUpdateTest, RefusesWhatItCannot) {
  Options offloaded;
  offloaded.offload.optimizer = memory::Tier::kHost;
  EXPECT_THAT(error_of([&] { trained<Lars>({.options = offloaded}); }),
              HasSubstr("keeps its states on the device"));
  Options small;
  small.optimizer_state = StateFormat::kBf16;
  EXPECT_THAT(error_of([&] { trained<Lars>({.options = small}); }), HasSubstr("states of fp32"));
}

}  // namespace
}  // namespace zeropage::own_tensor_update_test
