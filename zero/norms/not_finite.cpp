#include "zero/norms/not_finite.h"

#include <algorithm>
#include <sstream>

namespace zeropage::zero {

std::vector<std::string> names_of(const ParameterPages& pages,
                                  const std::vector<size_t>& parameters) {
  std::vector<std::string> names;
  for (const size_t index : parameters) names.push_back(pages.parameters()[index].parameter.name());
  return names;
}

std::vector<std::string> names_over_stages(const ParameterPages& pages,
                                           const std::vector<size_t>& parameters) {
  const std::vector<std::string> own = names_of(pages, parameters);
  const comm::World* const stages = pipeline_world_of(pages);
  if (stages == nullptr) return own;
  std::string text;
  for (const std::string& name : own) text += name + '\n';
  std::vector<std::string> names;
  for (const std::string& of_stage : stages->gather_text("gradients that are not finite", text)) {
    std::istringstream lines(of_stage);
    for (std::string name; std::getline(lines, name);) names.push_back(name);
  }
  return names;
}

std::string say_not_finite(const std::vector<std::string>& names) {
  constexpr size_t kMost = 3;
  const bool several = names.size() > 1;
  std::string text = several ? "the gradients of parameters " : "the gradient of parameter ";
  for (size_t index = 0; index < std::min(names.size(), kMost); ++index) {
    text += (index > 0 ? ", \"" : "\"") + names[index] + "\"";
  }
  if (names.size() > kMost) text += c10::str(" and ", names.size() - kMost, " more");
  return text + (several ? " are not finite" : " is not finite");
}

}  // namespace zeropage::zero
