#include "zero/layout/module_parameters.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/tiny_models.h"

namespace zeropage::module_parameters_test {
namespace {

TEST(ModuleParametersTest, ListsATiedParameterOnceWithAllItsNames) {
  testing::Oddball net;
  const auto parameters = zero::parameters_of(*net);
  const auto at = std::find_if(
      parameters.begin(), parameters.end(),
      [&](const zero::NamedParameter& parameter) { return parameter.tensor.is_same(net->tied); });
  ASSERT_NE(at, parameters.end());
  EXPECT_THAT(at->names, ::testing::UnorderedElementsAre("tied", "last.weight"));
  EXPECT_EQ(parameters.size() + 1, net->named_parameters().size());
}

TEST(ModuleParametersTest, KeepsTheOrderOfNamedParameters) {
  testing::Transformer net;
  std::vector<std::string> names;
  for (const auto& parameter : zero::parameters_of(*net)) names.push_back(parameter.name());
  EXPECT_EQ(names, net->named_parameters().keys());
}

TEST(ModuleParametersTest, GivesElementsOfAModuleListUnitsOfTheirOwn) {
  testing::Transformer net;
  std::map<std::string, int> unit_of_prefix;
  for (const auto& parameter : zero::parameters_of(*net)) {
    const std::string prefix = parameter.name().substr(0, parameter.name().find('.', 7));
    const auto [at, is_new] = unit_of_prefix.try_emplace(prefix, parameter.unit);
    if (is_new || !prefix.starts_with("blocks.")) continue;
    EXPECT_EQ(at->second, parameter.unit) << parameter.name();
  }
  EXPECT_NE(unit_of_prefix["blocks.0"], unit_of_prefix["blocks.1"]);
  EXPECT_NE(unit_of_prefix["blocks.5"], unit_of_prefix["norm.weight"]);
}

TEST(ModuleParametersTest, NumbersBareTensors) {
  const auto tensor = torch::zeros({3}, torch::requires_grad());
  const auto parameters =
      zero::parameters_of(std::vector<at::Tensor>{tensor, torch::zeros({1}), tensor});
  ASSERT_EQ(parameters.size(), 2U);
  EXPECT_THAT(parameters[0].names, ::testing::ElementsAre("parameter 0", "parameter 2"));
  EXPECT_EQ(describe(parameters[0]), "parameter \"parameter 0 = parameter 2\": Float [3]");
}

}  // namespace
}  // namespace zeropage::module_parameters_test
