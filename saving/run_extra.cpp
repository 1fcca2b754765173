#include <utility>

#include <nlohmann/json.hpp>

#include "zero/update/archive_values.h"
#include "zeropage/saving.h"

namespace zeropage {

RunExtra RunExtra::of_archive(std::function<void(torch::serialize::OutputArchive&)> save,
                              std::function<void(torch::serialize::InputArchive&)> load) {
  return {[save = std::move(save)] {
            return zero::saved_json("RunExtra::of()", save, zero::Nested::kRefused).dump();
          },
          [load = std::move(load)](const std::string& text) {
            zero::load_json(nlohmann::json::parse(text), load);
          }};
}

}  // namespace zeropage
