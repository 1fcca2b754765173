// examples/image_models/: the networks as published.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "examples/image_models/attention.h"
#include "examples/image_models/efficientnet.h"
#include "examples/image_models/model_registry.h"
#include "examples/image_models/resnet.h"
#include "tests/harness/errors.h"

namespace zeropage::image_models_test {
namespace {

using namespace image_models;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;

int64_t elements(const torch::nn::Module& module) {
  int64_t count = 0;
  for (const torch::Tensor& parameter : module.parameters()) count += parameter.numel();
  return count;
}

TEST(ImageModelsTest, HaveThePublishedNumberOfParameters) {
  const ModelRegistry models = ModelRegistry::standard();
  EXPECT_EQ(elements(*models.make("resnet18", {})), 11'689'512);
  EXPECT_EQ(elements(*models.make("resnet50", {})), 25'557'032);
  EXPECT_EQ(elements(*models.make("efficientnet_lite0", {})), 4'652'008);
  // Section 4.1 of BoTNet's paper: 20.8 million.
  EXPECT_NEAR(static_cast<double>(elements(*models.make("botnet50", {}))), 20.8e6, 0.1e6);
}

TEST(ImageModelsTest, GiveAScoreForEachClassAtAnyWidthAndForSmallImages) {
  const ModelRegistry models = ModelRegistry::standard();
  EXPECT_THAT(models.names(),
              ElementsAre("botnet50", "botnet50_small", "efficientnet_lite0", "resnet18",
                          "resnet18_small", "resnet50", "resnet50_small"));
  const torch::NoGradGuard no_grad;
  // 33 pixels become an odd number at each stage.
  for (const int64_t side : {32, 33}) {
    for (const std::string& name : models.names()) {
      const auto model = models.make(name, {.classes = 5, .image_side = side, .width = 8});
      EXPECT_EQ(model->forward(torch::randn({2, 3, side, side})).sizes(), (at::IntArrayRef{2, 5}))
          << name << " at " << side;
      EXPECT_EQ(model->named_parameters()[model->head() + ".bias"].numel(), 5) << name;
    }
  }
}

TEST(ImageModelsTest, HaveTheNamesOfThePublicWeights) {
  const ModelRegistry models = ModelRegistry::standard();
  const auto has = [&](const std::string& model, const std::string& name) {
    return models.make(model, {.width = 8})->named_parameters().contains(name);
  };
  EXPECT_TRUE(has("resnet18", "layer2.0.downsample.0.weight"));
  EXPECT_TRUE(has("resnet50", "layer4.2.conv3.weight"));
  EXPECT_TRUE(has("efficientnet_lite0", "_blocks.1._expand_conv.weight"));
}

// Attention as its formula says it, place by place.
TEST(ImageModelsTest, AttentionIsASoftmaxOverContentAndPosition) {
  constexpr int64_t kHeads = 2, kOfHead = 3, kSide = 4, kPlaces = kSide * kSide;
  const torch::NoGradGuard no_grad;
  SpatialAttention attention(kHeads * kOfHead, kHeads, kSide);
  const torch::Tensor x = torch::randn({2, kHeads * kOfHead, kSide, kSide});
  const torch::Tensor qkv = attention->qkv(x).view({2, 3, kHeads, kOfHead, kPlaces});
  torch::Tensor expected = torch::zeros({2, kHeads, kOfHead, kPlaces});
  for (int64_t image = 0; image < 2; ++image) {
    for (int64_t head = 0; head < kHeads; ++head) {
      const auto part = [&](int64_t which, int64_t place) {
        return qkv[image][which][head].select(1, place);
      };
      for (int64_t from = 0; from < kPlaces; ++from) {
        const torch::Tensor query = part(0, from) / std::sqrt(double{kOfHead});
        torch::Tensor logits = torch::zeros({kPlaces});
        for (int64_t to = 0; to < kPlaces; ++to) {
          const int64_t down = to / kSide - from / kSide, right = to % kSide - from % kSide;
          logits[to] = query.dot(part(1, to) + attention->rel_height[down + kSide - 1] +
                                 attention->rel_width[right + kSide - 1]);
        }
        const torch::Tensor weights = logits.softmax(0);
        for (int64_t to = 0; to < kPlaces; ++to) {
          expected[image][head].select(1, from) += weights[to] * part(2, to);
        }
      }
    }
  }
  EXPECT_TRUE(torch::allclose(attention(x), expected.view_as(x), 1e-4, 1e-5));
}

TEST(ImageModelsTest, EfficientNetPadsBehindWhereTheStrideLeavesOnePixel) {
  const torch::NoGradGuard no_grad;
  InvertedResidual block(InvertedResidualOptions{
      .channels = 1, .channels_out = 1, .expansion = 1, .kernel = 3, .stride = 2});
  block->eval();
  block->depthwise->weight.fill_(1);
  block->project->weight.fill_(1);
  const torch::Tensor out = block(torch::full({1, 1, 4, 4}, 0.1)) * 1.001;  // two norms' epsilon
  EXPECT_TRUE(
      torch::allclose(out.squeeze(), torch::tensor({{0.9, 0.6}, {0.6, 0.4}}, torch::kFloat), 1e-3));
}

TEST(ImageModelsTest, WhatCannotBeMadeIsRefusedInWords) {
  ModelRegistry models = ModelRegistry::standard();
  EXPECT_THAT(error_of([&] { models.make("resnet19", {}); }),
              HasSubstr("there is no model \"resnet19\"; expected one of botnet50, "));
  EXPECT_THAT(error_of([&] { models.add("resnet18", nullptr); }),
              HasSubstr("there is a model \"resnet18\" already"));
  EXPECT_THAT(error_of([&] { models.make("resnet18", {.classes = 0}); }),
              HasSubstr("a ResNet: expected a width, classes"));
  EXPECT_THAT(error_of([] { SpatialAttention(6, 4, 3); }),
              HasSubstr("self-attention: 6 channels cannot be shared by 4 heads"));
  const auto botnet = models.make("botnet50_small", {.classes = 2, .image_side = 32, .width = 8});
  EXPECT_THAT(error_of([&] {
                botnet->forward(torch::randn({2, 3, 48, 48}));
              }),
              HasSubstr("self-attention: was made for a square of 8 x 8, got [2, 64, 12, 12]"));
}

}  // namespace
}  // namespace zeropage::image_models_test
