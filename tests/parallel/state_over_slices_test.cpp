// The state of a module that is cut over ranks: the files that any other number of ranks writes and reads.
#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/state_files.h"
#include "tests/parallel/tensor_modules.h"
#include "zeropage/tensor_parallel.h"
#include "zeropage/zeropage.h"

namespace zeropage::state_over_slices_test {
namespace {

using namespace zeropage::tensor_modules;
using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using memory::operator""_KiB;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

struct Shape {
  int data = 1;
  int tensor = 1;
  int stage = 3;

  int ranks() const { return data * tensor; }
};

// What a run computes in.
enum class In : uint8_t { kDouble, kBFloat16 };

Options options_of(const Shape& shape, In in) {
  Options options;
  options.stage = stage_of(shape.stage);
  options.page_bytes = 4_KiB;
  options.update_by = UpdateBy::kClass;
  if (in == In::kBFloat16) options.compute_dtype = torch::kBFloat16;
  return options;
}

// A module as its user wrote it, cut by a plan, over a mesh.
struct ByPlan {
  using Module = Plain;

  static Plain make(const World& tensor, In in) {
    Plain plain = make_plain();
    if (in == In::kBFloat16) plain->to(torch::kFloat);
    if (tensor.size() > 1) tensor_parallel(plain, tensor, plan());
    return plain;
  }
};

// One of layers that are slices.
struct ByLayers {
  using Module = Explicit;

  static Explicit make(const World& tensor, In /*in*/) {
    Explicit module(tensor);
    module->to(torch::kDouble);
    return module;
  }
};

template <typename How>
struct Training {
  Training(World& all, const Shape& shape, In in)
      : mesh(all, {{"data", shape.data}, {"tensor", shape.tensor}}),
        model(How::make(mesh["tensor"], in), mesh, options_of(shape, in)),
        optimizer(model, AdamWOptions(0.01)) {}

  void train(int first, int steps) {
    for (int step = first; step < first + steps; ++step) {
      optimizer.zero_grad();
      const int seed = 10 * step + mesh["data"].rank();
      const torch::Tensor hidden = model(ids_of(seed));
      whole_loss(model->logits(hidden), targets_of(seed)).backward();
      optimizer.step();
    }
  }

  Mesh mesh;
  DistributedDataParallel<typename How::Module> model;
  Optimizer<AdamW> optimizer;
};

// Loads the state at that mesh, and saves it again.
template <typename How>
void save_again(const std::filesystem::path& from, const std::filesystem::path& to,
                const Shape& shape, In in) {
  run_ranks(shape.ranks(), [&](World& all) {
    Training<How> run(all, shape, in);
    RunState state;
    load_state(from, run.model, run.optimizer, state);
    check_can_save(to.parent_path(), run.model, run.optimizer);
    save_state(to, run.model, run.optimizer, state);
  });
}

class StateOverSlicesTest : public ::testing::TestWithParam<In> {
 protected:
  std::filesystem::path path(const std::string& name) const {
    return std::filesystem::path(folder_.path()) / name;
  }

  const DiskFolder folder_;
};

TEST_P(StateOverSlicesTest, IsTheSameFilesAtEveryMesh) {
  const Shape first{.data = 4, .stage = 1};
  run_ranks(first.ranks(), [&](World& all) {
    Training<ByPlan> run(all, first, GetParam());
    run.train(0, 2);
    save_state(path("first"), run.model, run.optimizer, {.samples = 24});
  });
  std::filesystem::path before = path("first");
  for (const Shape& shape : {Shape{.data = 2, .tensor = 2, .stage = 3},
                             {.data = 1, .tensor = 3, .stage = 1},
                             {.data = 2, .tensor = 2, .stage = 0},
                             {.data = 3, .tensor = 1, .stage = 2}}) {
    SCOPED_TRACE(c10::str("data ", shape.data, ", tensor ", shape.tensor));
    const auto next =
        path(c10::str("data-", shape.data, "-tensor-", shape.tensor, "-", shape.stage));
    save_again<ByPlan>(before, next, shape, GetParam());
    expect_same_files(path("first"), next);
    before = next;
  }
}

TEST_P(StateOverSlicesTest, LetsARunGoOnWithTheSameBits) {
  for (const int stage : {0, 1, 3}) {
    SCOPED_TRACE(c10::str("stage ", stage));
    const Shape shape{.data = 2, .tensor = 2, .stage = stage};
    const auto middle = path(c10::str("middle-", stage)), end = path(c10::str("end-", stage)),
               resumed = path(c10::str("resumed-", stage));
    run_ranks(shape.ranks(), [&](World& all) {
      Training<ByPlan> run(all, shape, GetParam());
      run.train(0, 2);
      save_state(middle, run.model, run.optimizer);
      run.train(2, 2);
      save_state(end, run.model, run.optimizer);
    });
    run_ranks(shape.ranks(), [&](World& all) {
      Training<ByPlan> run(all, shape, GetParam());
      run.train(7, 1);  // what it had before does not matter
      load_state(middle, run.model, run.optimizer);
      run.train(2, 2);
      save_state(resumed, run.model, run.optimizer);
    });
    expect_same_files(end, resumed);
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, StateOverSlicesTest, ::testing::Values(In::kDouble, In::kBFloat16),
                         [](const auto& info) {
                           return info.param == In::kDouble ? "Double" : "BFloat16";
                         });

class WholeStateTest : public StateOverSlicesTest {};

TEST_F(WholeStateTest, OfAPlainModuleIsThatOfLayersThatAreSlices) {
  run_ranks(1, [&](World& all) {
    Training<ByPlan> run(all, {}, In::kDouble);
    run.train(0, 1);
    save_state(path("plain"), run.model, run.optimizer);
  });
  save_again<ByLayers>(path("plain"), path("layers"), {.data = 1, .tensor = 2}, In::kDouble);
  expect_same_files(path("plain"), path("layers"));
  Plain whole = make_plain();
  {
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& parameter : whole->parameters()) parameter.zero_();
  }
  load_weights(path("layers"), whole);
  const Plain untrained = make_plain();
  const auto close = [&](const torch::Tensor& a, const torch::Tensor& b) {
    return (a - b).abs().max().item<double>() < 0.02;  // a step of AdamW
  };
  EXPECT_TRUE(close(whole->out->weight.detach(), untrained->out->weight.detach()));
  EXPECT_TRUE(close(whole->qkv->weight.detach(), untrained->qkv->weight.detach()));
}

TEST_F(WholeStateTest, IsSavedBesideTrainingByAllRanks) {
  const Shape shape{.data = 2, .tensor = 2, .stage = 1};
  run_ranks(shape.ranks(), [&](World& all) {
    Training<ByPlan> run(all, shape, In::kDouble);
    StateSaver saver(path("run"), run.model.all_ranks());
    run.train(0, 1);
    saver.save(run.model, run.optimizer, {.step = 1});
    saver.wait();
    save_state(path("now"), run.model, run.optimizer, {.step = 1});
  });
  expect_same_files(path("now"), path("run") / "step-1");
}

TEST_F(WholeStateTest, OfAModuleThatIsNotWrappedOverTheMeshIsRefused) {
  run_ranks(2, [&](World& all) {
    const Mesh mesh(all, {{"data", 1}, {"tensor", 2}});
    DistributedDataParallel<Plain> model(ByPlan::make(mesh["tensor"], In::kDouble), mesh["data"]);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    const auto words = AllOf(HasSubstr("each of 2 ranks has slices of parameters"),
                             HasSubstr("wrap the module over the whole mesh"));
    EXPECT_THAT(error_of([&] { save_state(path("x"), model, optimizer); }), words);
    EXPECT_THAT(error_of([&] { load_state(path("x"), model, optimizer); }), words);
    EXPECT_FALSE(std::filesystem::exists(path("x")));

    Training<ByPlan> run(all, {.data = 1, .tensor = 2}, In::kDouble);
    StateSaver saver(path("run"), run.model.world());
    EXPECT_THAT(error_of([&] { saver.save(run.model, run.optimizer); }),
                AllOf(HasSubstr("one of 2 ranks, but the saver was made over 1"),
                      HasSubstr("all_ranks()")));
  });
}

TEST_F(WholeStateTest, OfAnotherNumberOfOutputsIsRefusedByTheWholeShape) {
  run_ranks(2, [&](World& all) {
    const Mesh mesh(all, {{"data", 1}, {"tensor", 2}});
    const auto wrapped = [&](int64_t outputs) {
      torch::nn::Sequential net(torch::nn::Linear(4, outputs));
      tensor_parallel(net, mesh["tensor"], {{"0", Cut::column()}});
      return DistributedDataParallel<torch::nn::Sequential>(net, mesh);
    };
    auto six = wrapped(6), eight = wrapped(8);
    save_weights(path("six"), six);
    EXPECT_THAT(error_of([&] { load_weights(path("six"), eight); }),
                AllOf(HasSubstr("\"0.weight\" of [8, 4]"), HasSubstr("[6, 4]")));
  });
}

// A layer of 8 heads of queries and 2 of keys and values, of 3 numbers each.
TEST_F(WholeStateTest, OfPartsOfOtherSizesIsTheSameFilesAtEveryMesh) {
  static constexpr int64_t kOfHead = 3, kWide = 12 * kOfHead;
  const auto make = [] {
    torch::nn::Sequential net(torch::nn::Linear(5, kWide), torch::nn::Linear(kWide, 4));
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& parameter : net->parameters()) {
      parameter.copy_(torch::arange(parameter.numel()).view(parameter.sizes()));
    }
    return net;
  };
  const torch::nn::Sequential whole = make();
  const auto in_order = torch::arange(kWide);
  const auto run = [&](const Shape& shape, const auto& use) {
    run_ranks(shape.ranks(), [&](World& all) {
      const Mesh mesh(all, {{"data", shape.data}, {"tensor", shape.tensor}});
      torch::nn::Sequential net = make();
      tensor_parallel(net, mesh["tensor"], {{"0", Cut::column().parts({8, 2, 2}).unit(kOfHead)}});
      const torch::Tensor slice = own_slice(net[0]->as<torch::nn::Linear>()->bias);
      if (shape.tensor == 2) {
        const int64_t own = mesh["tensor"].rank();
        const auto rows = [&](int64_t begin, int64_t end) {
          return in_order.slice(0, begin * kOfHead, end * kOfHead);
        };
        EXPECT_TRUE(slice.equal(torch::cat({rows(4 * own, 4 * own + 4), rows(8 + own, 9 + own),
                                            rows(10 + own, 11 + own)})
                                    .to(torch::kFloat)));
      }
      DistributedDataParallel<torch::nn::Sequential> model(net, mesh,
                                                           options_of(shape, In::kDouble));
      Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
      use(net, model, optimizer);
      const torch::NoGradGuard no_grad;
      const GatheredParameters guard(model);
      const auto parameters = net->named_parameters();
      for (const auto& item : whole->named_parameters()) {
        EXPECT_TRUE(item.value().detach().equal(whole_of(parameters[item.key()]))) << item.key();
      }
    });
  };
  const Shape plain{.data = 1, .tensor = 1, .stage = 0};
  run(plain,
      [&](auto&, auto& model, auto& optimizer) { save_state(path("whole"), model, optimizer); });
  for (const Shape& shape :
       {Shape{.data = 1, .tensor = 2, .stage = 0}, {.data = 2, .tensor = 2, .stage = 3}}) {
    const auto to = path(c10::str("of-", shape.ranks()));
    run(shape, [&](auto& net, auto& model, auto& optimizer) {
      {
        const torch::NoGradGuard no_grad;
        for (torch::Tensor& parameter : net->parameters()) parameter.zero_();
      }
      load_state(path("whole"), model, optimizer);
      save_state(to, model, optimizer);
    });
    expect_same_files(path("whole"), to);
  }
}

TEST(MeshOfAWrapperTest, HasAnAxisOfDataAndTheOneOfTheSlices) {
  run_ranks(2, [](World& all) {
    const auto refusal = [&](const std::vector<MeshAxis>& axes, bool cuts) {
      const Mesh mesh(all, axes);
      torch::nn::Sequential net(torch::nn::Linear(4, 4));
      if (cuts) tensor_parallel(net, mesh[axes.back().name], {{"0", Cut::column()}});
      return error_of([&] { DistributedDataParallel<torch::nn::Sequential>(net, mesh); });
    };
    EXPECT_THAT(refusal({{"tensor", 2}}, true), AllOf(HasSubstr("the mesh has the axes \"tensor\""),
                                                      HasSubstr("add {\"data\", 1}")));
    EXPECT_THAT(refusal({{"pipeline", 2}, {"data", 1}}, false),
                HasSubstr("the mesh's axis \"pipeline\" has 2 ranks"));
    EXPECT_THAT(refusal({{"data", 1}, {"tensor", 2}}, false),
                HasSubstr("has 2 ranks, but no parameter of the module is a slice"));
    EXPECT_THAT(refusal({{"data", 1}, {"slices", 2}}, true),
                HasSubstr("the mesh's axis \"slices\" has 2 ranks"));
    EXPECT_THAT(refusal({{"tensor", 1}, {"data", 2}}, true),
                HasSubstr("slices over 2 ranks that are no axis \"tensor\""));
    EXPECT_EQ(refusal({{"data", 1}, {"tensor", 2}}, true), "");
    EXPECT_EQ(refusal({{"data", 2}}, false), "");
  });
}

}  // namespace
}  // namespace zeropage::state_over_slices_test
