// Several sources as one, with other names.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <zeropage/saving.h>

namespace language_model {

class RenamedWeights final : public zeropage::WeightsSource {
 public:
  // The module's name of a tensor of the source; none: it is left out.
  using Rename = std::function<std::optional<std::string>(const std::string& name)>;

  explicit RenamedWeights(std::unique_ptr<zeropage::WeightsSource> source,
                          const Rename& rename = nullptr) {
    add(std::move(source), rename);
  }

  // The first of several tensors of one name counts.
  void add(std::unique_ptr<zeropage::WeightsSource> source, const Rename& rename = nullptr);

  std::string name() const override { return sources_.front()->name(); }
  const std::vector<Entry>& tensors() const override { return tensors_; }
  std::map<std::string, std::string> aliases() const override;
  void read(const Entry& entry, int64_t first, const at::Tensor& to) override;

 private:
  struct Place {
    size_t source = 0;
    const Entry* entry = nullptr;
  };

  std::vector<std::unique_ptr<zeropage::WeightsSource>> sources_;
  std::vector<Entry> tensors_;
  std::map<std::string, Place> places_;
};

}  // namespace language_model
