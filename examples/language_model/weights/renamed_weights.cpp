#include "language_model/weights/renamed_weights.h"

namespace language_model {

void RenamedWeights::add(std::unique_ptr<zeropage::WeightsSource> source, const Rename& rename) {
  for (const Entry& entry : source->tensors()) {
    const std::optional<std::string> name = rename ? rename(entry.name) : entry.name;
    if (!name || !places_.emplace(*name, Place{sources_.size(), &entry}).second) continue;
    tensors_.push_back({.name = *name, .sizes = entry.sizes, .dtype = entry.dtype});
  }
  sources_.push_back(std::move(source));
}

std::map<std::string, std::string> RenamedWeights::aliases() const {
  std::map<std::string, std::string> all;
  for (const auto& source : sources_) all.merge(source->aliases());
  return all;
}

void RenamedWeights::read(const Entry& entry, int64_t first, const at::Tensor& to) {
  const Place& place = places_.at(entry.name);
  sources_[place.source]->read(*place.entry, first, to);
}

}  // namespace language_model
