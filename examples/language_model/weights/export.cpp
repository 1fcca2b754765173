#include "language_model/weights/export.h"

#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <stdexcept>

#include <zeropage/gathered_parameters.h>
#include <zeropage/tensor_parallel.h>

#include "language_model/weights/adapters.h"
#include "language_model/weights/exact_values.h"
#include "language_model/weights/expert_names.h"
#include "language_model/weights/model_files.h"
#include "language_model/weights/safetensors_writer.h"
#include "language_model/weights/tokenizer_files.h"

namespace language_model {
namespace {

namespace fs = std::filesystem;

// A tied parameter under its first name alone.
std::vector<SafetensorsWriter::Entry> entries_of(const WrappedModel& model,
                                                 const ExportOptions& options) {
  std::vector<SafetensorsWriter::Entry> entries;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& parameter : model.named_parameters()) {
    const torch::Tensor& tensor = parameter.value();
    if (is_of_adapter(parameter.key()) || !seen.insert(tensor.unsafeGetTensorImpl()).second)
      continue;
    for (FileTensor& of_file : tensors_in_files(model->config(), parameter.key(), tensor.sizes())) {
      entries.push_back({std::move(of_file.name), std::move(of_file.sizes),
                         options.dtype.value_or(tensor.scalar_type())});
    }
  }
  return entries;
}

// The parameters that are written, a tied one under its first name alone.
std::set<std::string> written_parameters(const WrappedModel& model) {
  std::set<std::string> names;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& parameter : model.named_parameters()) {
    const bool is_new = seen.insert(parameter.value().unsafeGetTensorImpl()).second;
    if (is_new && !is_of_adapter(parameter.key())) names.insert(parameter.key());
  }
  return names;
}

// In fp32, or in fp64 where they are.
torch::Tensor in_wide_type(const torch::Tensor& values) {
  return values.to(c10::promoteTypes(values.scalar_type(), torch::kFloat32));
}

using Visit = std::function<void(const std::string& name, const torch::Tensor& values)>;

// The parameters of these names, whole, one after the other. As exact as there are any, where they are to be written in more digits
// than they have.
void visit_each(WrappedModel& model, const std::set<std::string>& names,
                const ExportOptions& options, const Visit& visit) {
  if (options.dtype == torch::kFloat32) {
    visit_exact_values(
        model, [&](const std::string& name) { return names.contains(name); }, visit);
    return;
  }
  const bool is_spread = model->expert_ranks() != nullptr;
  zeropage::visit_parameters(model, [&](const std::string& name, const torch::Tensor& values) {
    if (!names.contains(name)) return;
    const bool is_cut = is_spread && is_stack(model->config(), name);
    visit(name, is_cut ? zeropage::whole_of(values) : values);
  });
}

// What adapters add, from their exact values.
class AdapterProducts {
 public:
  explicit AdapterProducts(WrappedModel& model) {
    for (const auto& [name, layer] : model->projections()) {
      if (layer->has_adapter()) layers_.emplace(name + ".weight", layer);
    }
    if (layers_.empty()) return;
    visit_exact_values(model, is_of_adapter, [&](const auto& name, const torch::Tensor& values) {
      adapters_.emplace(name, in_wide_type(values));
    });
  }

  // weight: the name of a layer's. Without an adapter: values.
  torch::Tensor merged(const std::string& weight, const torch::Tensor& values) const {
    const auto layer = layers_.find(weight);
    if (layer == layers_.end()) return values;
    const std::string prefix = weight.substr(0, weight.size() - std::string("weight").size());
    return in_wide_type(values) +
           layer->second->adapter_product(adapters_.at(prefix + "lora_A.weight"),
                                          adapters_.at(prefix + "lora_B.weight"));
  }

 private:
  std::map<std::string, Projection> layers_;
  std::map<std::string, torch::Tensor> adapters_;
};

}  // namespace

void RankZero::settle(const std::string& topic) const {
  for (const std::string& error : world_.gather_text(topic, error_)) {
    if (!error.empty()) throw std::runtime_error(error);
  }
}

void write_json(const fs::path& file, const nlohmann::json& content) {
  std::ofstream stream(file);
  stream << content.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
  stream.close();
  TORCH_CHECK(stream, file.string(), ": cannot be written; is there room?");
}

const char* name_of(torch::ScalarType dtype) {
  switch (dtype) {
    case torch::kBFloat16:
      return "bfloat16";
    case torch::kHalf:
      return "float16";
    case torch::kFloat64:
      return "float64";
    default:
      return "float32";
  }
}

std::string export_model(const fs::path& folder, WrappedModel& model,
                         const ExportOptions& options) {
  const torch::NoGradGuard no_grad;
  const auto entries = entries_of(model, options);
  const std::set<std::string> names = written_parameters(model);
  const AdapterProducts adapters(model);
  RankZero writing(model.all_ranks());
  std::unique_ptr<SafetensorsWriter> file;
  std::string note;
  writing.run([&] {
    fs::create_directories(folder);
    file = std::make_unique<SafetensorsWriter>(folder / ModelFiles::kWeights, entries);
  });
  visit_each(model, names, options, [&](const std::string& name, const torch::Tensor& values) {
    writing.run([&] {
      const auto of_files = tensors_in_files(model->config(), name, values.sizes());
      if (!is_stack(model->config(), name)) {
        file->write(of_files.front().name, adapters.merged(name, values));
        return;
      }
      for (size_t i = 0; i < of_files.size(); ++i) {
        file->write(of_files[i].name, values[static_cast<int64_t>(i)]);
      }
    });
  });
  writing.run([&] {
    file->finish();
    write_json(folder / ModelFiles::kConfig,
               to_json(model->config(), name_of(entries.front().dtype)));
    note = write_tokenizer(options.tokenizer_from, folder);
  });
  writing.settle("exporting the model to " + folder.string());
  return note;
}

}  // namespace language_model
