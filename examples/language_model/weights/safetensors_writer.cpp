#include "language_model/weights/safetensors_writer.h"

#include <utility>

namespace language_model {
namespace {

namespace fs = std::filesystem;
namespace state = zeropage::state;

state::Dtype dtype_of(torch::ScalarType dtype) {
  switch (dtype) {
    case torch::kFloat32:
      return state::Dtype::kF32;
    case torch::kBFloat16:
      return state::Dtype::kBF16;
    case torch::kHalf:
      return state::Dtype::kF16;
    case torch::kFloat64:
      return state::Dtype::kF64;
    default:
      TORCH_CHECK(false, "weights are written as float32, bfloat16, float16 or float64, not as ",
                  dtype);
  }
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(fs::path path, const std::vector<Entry>& entries)
    : path_(std::move(path)), unfinished_(path_.string() + ".writing") {
  std::vector<state::TensorEntry> tensors;
  for (const Entry& entry : entries) {
    tensors.push_back({.name = entry.name,
                       .dtype = dtype_of(entry.dtype),
                       .shape = {entry.sizes.begin(), entry.sizes.end()}});
  }
  // Without "format" the library transformers refuses the file.
  const std::string prefix = state::safetensors_prefix(tensors, {{"format", "pt"}});
  const uint64_t bytes = state::place_in_order(tensors);
  for (size_t i = 0; i < entries.size(); ++i) {
    places_[entries[i].name] = {prefix.size() + tensors[i].begin, entries[i].dtype, false};
  }
  fs::remove(unfinished_);
  file_ = std::make_unique<state::File>(unfinished_, state::File::Access::kCreate);
  file_->allocate(prefix.size() + bytes);
  file_->write(0, prefix.data(), prefix.size());
}

SafetensorsWriter::~SafetensorsWriter() {
  std::error_code ignored;
  if (file_) fs::remove(unfinished_, ignored);
}

void SafetensorsWriter::write(const std::string& name, const torch::Tensor& values) {
  Place& place = places_.at(name);
  const torch::Tensor stored = values.detach().to(torch::kCPU, place.dtype).contiguous();
  file_->write(place.begin, static_cast<const char*>(stored.const_data_ptr()), stored.nbytes());
  place.is_written = true;
}

void SafetensorsWriter::finish() {
  for (const auto& [name, place] : places_) TORCH_CHECK(place.is_written, name, " was not written");
  file_->sync();
  file_.reset();
  fs::rename(unfinished_, path_);
}

}  // namespace language_model
