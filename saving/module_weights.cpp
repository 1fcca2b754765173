#include <set>
#include <utility>

#include <ATen/ATen.h>

#include "saving/detail/name_lists.h"
#include "saving/detail/state_plan.h"
#include "saving/detail/weight_files.h"
#include "zero/layout/module_parameters.h"
#include "zero/model_parts.h"
#include "zeropage/check.h"
#include "zeropage/ledger.h"
#include "zeropage/saving.h"

namespace zeropage {
namespace {

using detail::WeightFiles;
using state::StateError;

std::vector<NamedParameter> tensors_of(const torch::nn::Module& module) {
  std::vector<NamedParameter> tensors = parameters_of(module);
  for (NamedParameter& buffer : buffers_each_once(module)) {
    tensors.push_back(std::move(buffer));
  }
  for (const NamedParameter& named : tensors) {
    ZP_CHECK(!named.tensor.is_meta(), "load_weights(): \"", named.name(),
             "\" is on the meta device, without memory; construct the module with memory, or wrap "
             "its DeferredModule in DistributedDataParallel and load a saved state");
  }
  return tensors;
}

// What a file has of a module.
class Matching {
 public:
  Matching(const WeightFiles& files, const std::vector<NamedParameter>& tensors,
           const ModuleLoadOptions& options)
      : files_(files), options_(options) {
    const std::vector<std::string> names = files.names();
    left_.insert(names.begin(), names.end());
    for (const NamedParameter& named : tensors) match(named);
    report_.unexpected.assign(left_.begin(), left_.end());
  }

  const ModuleLoadReport& report() const { return report_; }
  // What does not fit.
  const std::vector<std::string>& unfit() const { return unfit_; }

  void load() const {
    const at::NoGradGuard no_grad;
    const memory::KindScope kind(memory::Kind::kStaging);
    for (const auto& [tensor, found] : found_) {
      const auto dtype = detail::scalar_type(found.entry->dtype);
      const at::Tensor read = at::empty(tensor.sizes(), dtype);
      files_.read(found, static_cast<char*>(read.mutable_data_ptr()));
      at::Tensor(tensor).copy_(read);
    }
  }

 private:
  void match(const NamedParameter& named) {
    for (const std::string& own : named.names) {
      const std::string name = name_in_file(own);
      const WeightFiles::Found found = files_.find(name);
      if (!found) continue;
      left_.erase(found.entry->name);
      // Tied here, and of their own there.
      for (const std::string& other : named.names) left_.erase(name_in_file(other));
      if (fits(named, found)) found_.emplace_back(named.tensor, found);
      return;
    }
    report_.missing.push_back(named.name());
  }

  bool fits(const NamedParameter& named, const WeightFiles::Found& found) {
    const auto dtype = detail::scalar_type(found.entry->dtype);
    const bool is_shaped = found.entry->shape == detail::shape_of(named.tensor.sizes());
    const bool is_alike = at::isFloatingType(dtype) == named.tensor.is_floating_point();
    if (is_shaped && is_alike) return true;
    const std::vector<int64_t> shape(found.entry->shape.begin(), found.entry->shape.end());
    unfit_.push_back(c10::str(named.name(), " (expected ", named.tensor.scalar_type(), " ",
                              named.tensor.sizes(), ", got ", dtype, " ", at::IntArrayRef(shape),
                              ")"));
    return false;
  }

  std::string name_in_file(const std::string& name) const {
    const auto mapped = options_.names.find(name);
    return options_.prefix + (mapped == options_.names.end() ? name : mapped->second);
  }

  const WeightFiles& files_;
  const ModuleLoadOptions& options_;
  std::set<std::string> left_;
  ModuleLoadReport report_;
  std::vector<std::string> unfit_;
  std::vector<std::pair<at::Tensor, WeightFiles::Found>> found_;
};

}  // namespace

ModuleLoadReport load_weights(const std::filesystem::path& path, torch::nn::Module& module,
                              const ModuleLoadOptions& options) {
  const std::vector<NamedParameter> tensors = tensors_of(module);
  const WeightFiles files(path);
  const Matching matching(files, tensors, options);
  const ModuleLoadReport& report = matching.report();
  const bool is_whole = report.missing.empty() && report.unexpected.empty();
  if (!matching.unfit().empty() || (options.strict && !is_whole)) {
    throw StateError(
        path.string(), 0,
        "the weights are of another module:" + detail::list_of("missing in it", report.missing) +
            detail::list_of("unexpected", report.unexpected) +
            detail::list_of("of another shape or kind", matching.unfit()) +
            "\nGive ModuleLoadOptions::names or prefix, or load what is there with "
            "strict = false; shapes must be the module's");
  }
  matching.load();
  return report;
}

}  // namespace zeropage
