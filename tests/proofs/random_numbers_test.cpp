// Random numbers on a mesh of {data, tensor}: the ranks that compute a sample together draw the same masks for what
// all of them hold, those with other samples draw others. A process a rank, as the generator is the process's.
#include <gtest/gtest.h>

#include "tests/comm/launched_process.h"
#include "tests/parallel/tensor_modules.h"
#include "zeropage/check.h"
#include "zeropage/parallel_layers.h"
#include "zeropage/zeropage.h"

namespace zeropage::random_numbers_test {
namespace {

using namespace zeropage::tensor_modules;
using comm::LaunchedProcess;

constexpr double kDropped = 0.3;

// Two ranks have one and two of the heads, so they make different numbers of draws in attention.
torch::Tensor forward(Plain& module, const torch::Tensor& ids, const World& tensor) {
  const auto drop = [](const torch::Tensor& t) { return torch::dropout(t, kDropped, true); };
  const auto by_head = [](const torch::Tensor& t) {
    return t.view({t.size(0), t.size(1), -1, kHead}).transpose(1, 2);
  };
  const torch::Tensor x = drop(module->tokens(ids));
  const auto qkv = module->qkv(module->norm1(x)).chunk(3, -1);
  torch::Tensor mixed;
  {
    const parallel::RandomOfRank own(tensor);
    mixed = at::scaled_dot_product_attention(by_head(qkv[0]), by_head(qkv[1]), by_head(qkv[2]), {},
                                             kDropped);
  }
  return x + drop(module->out(mixed.transpose(1, 2).flatten(2)));
}

void check_masks(World& all) {
  at::set_num_threads(1);
  const Mesh mesh(all, {{"data", 2}, {"tensor", 2}});
  const World &data = mesh["data"], &tensor = mesh["tensor"];
  const auto are_alike = [](const World& world, const torch::Tensor& values) {
    return torch::equal(world.min(values), world.max(values));
  };
  Plain module = make_plain();
  tensor_parallel(module, tensor, plan());
  Options options;
  options.stage = stage_of(1);
  options.update_by = UpdateBy::kClass;
  DistributedDataParallel<Plain> model(module, data, options);
  Optimizer<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(0.1));
  torch::manual_seed(7 + static_cast<uint64_t>(data.rank()));
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    const torch::Tensor hidden = forward(module, ids_of(step), tensor);
    ZP_CHECK(are_alike(tensor, hidden.detach()), "masks differ along tensor in step ", step);
    ZP_CHECK(!are_alike(data, hidden.detach()), "masks are the same along data in step ", step);
    hidden.square().sum().backward();
    optimizer.step();
    const torch::Tensor weight = module->norm1->weight.detach();
    ZP_CHECK(are_alike(all, weight), "a norm's weight differs between ranks after step ", step);
    ZP_CHECK(!torch::equal(weight, torch::ones_like(weight)), "nothing was trained");
  }
}

TEST(RandomNumbersTest, AreTheSameAlongTensorForWhatIsWholeAndDifferAlongData) {
  LaunchedProcess launched([] {
    return World::launch(4, [](World& world) {
      try {
        check_masks(world);
        return 0;
      } catch (const std::exception& error) {
        std::fprintf(stderr, "error: %s\n", memory::message_of(error).c_str());
        return 1;
      }
    });
  });
  EXPECT_EQ(launched.wait(), 0) << launched.err();
}

}  // namespace
}  // namespace zeropage::random_numbers_test
