#include <algorithm>
#include <fnmatch.h>

#include "zeropage/options.h"
#include "zeropage/parallel_layers.h"

namespace zeropage {

ModuleSelection ModuleSelection::batch_norms() {
  return of_type<torch::nn::BatchNorm1d, torch::nn::BatchNorm2d, torch::nn::BatchNorm3d,
                 parallel::SyncBatchNorm>();
}

ModuleSelection ModuleSelection::named(const std::vector<std::string>& patterns) {
  return where([patterns](const std::string& name, const torch::nn::Module&) {
    return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
      return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
    });
  });
}

bool ModuleSelection::contains(const std::string& name, const torch::nn::Module& module) const {
  return std::any_of(rules_.begin(), rules_.end(),
                     [&](const Rule& rule) { return rule(name, module); });
}

}  // namespace zeropage
