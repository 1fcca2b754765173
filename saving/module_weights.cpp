#include <utility>

#include <ATen/ATen.h>

#include "memory/storage.h"
#include "saving/detail/weight_files.h"
#include "saving/detail/weight_matching.h"
#include "zero/layout/module_parameters.h"
#include "zero/model_parts.h"
#include "zeropage/check.h"
#include "zeropage/ledger.h"
#include "zeropage/saving.h"

namespace zeropage {
namespace {

std::vector<zero::NamedParameter> tensors_of(const torch::nn::Module& module) {
  std::vector<zero::NamedParameter> tensors = zero::parameters_of(module);
  for (zero::NamedParameter& buffer : zero::buffers_each_once(module)) {
    tensors.push_back(std::move(buffer));
  }
  for (const zero::NamedParameter& named : tensors) {
    ZP_CHECK(!named.tensor.is_meta(), "load_weights(): \"", named.name(),
             "\" is on the meta device, without memory; construct the module with memory, or wrap "
             "its DeferredModule in DistributedDataParallel and load into that");
  }
  return tensors;
}

}  // namespace

ModuleLoadReport load_weights(WeightsSource& source, torch::nn::Module& module,
                              const ModuleLoadOptions& options) {
  const std::vector<zero::NamedParameter> tensors = tensors_of(module);
  saving::WeightMatching matching(source, options.names, options.prefix);
  std::vector<std::pair<zero::NamedParameter, const WeightsSource::Entry*>> found;
  for (const zero::NamedParameter& named : tensors) {
    const auto* const entry =
        matching.match(named.names, named.tensor.sizes(), named.tensor.scalar_type());
    if (entry != nullptr) found.emplace_back(named, entry);
  }
  ModuleLoadReport report = matching.report();
  matching.check(report, options.strict);
  const at::NoGradGuard no_grad;
  const memory::KindScope kind(memory::Kind::kStaging);
  for (const auto& [named, entry] : found) {
    const at::Tensor& tensor = named.tensor;
    const at::Tensor read = at::empty({tensor.numel()}, entry->dtype);
    source.read(*entry, 0, read);
    memory::write_values(tensor, read.view(tensor.sizes()), "\"" + named.names.front() + "\"");
  }
  return report;
}

ModuleLoadReport load_weights(const std::filesystem::path& path, torch::nn::Module& module,
                              const ModuleLoadOptions& options) {
  saving::WeightFiles files(path);
  return load_weights(files, module, options);
}

std::unique_ptr<WeightsSource> open_weights(const std::filesystem::path& path) {
  return std::make_unique<saving::WeightFiles>(path);
}

}  // namespace zeropage
