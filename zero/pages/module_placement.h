// Whether the module still has its parameters in their pages, and the way back for those that were given
// other memory: by torch::load(), ->to() or set_data().
//
// Threads: the training thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/pages/page_memory.h"
#include "zero/pages/parameter_pages.h"

namespace zeropage::zero {

class ModulePlacement {
 public:
  // Parameters are in their pages.
  ModulePlacement(std::shared_ptr<const ParameterPages> pages,
                  std::shared_ptr<const PageMemory> memory);

  const PlacedParameters& parameters() const { return pages_->parameters(); }
  // The pages have other memory, and parameters are there.
  void note_moved();
  // Throws if a parameter no longer lives in its page, or the model is parked. who: "step()".
  void check(const char* who) const;
  // The same in a pass of the caller's: whether one still lives there, and check()'s error.
  bool has(size_t parameter) const;
  [[noreturn]] void throw_elsewhere(size_t parameter, const char* who) const;
  // What has() looks at behind the parameter's tensor, for a scan that asks for it ahead.
  const c10::StorageImpl* storage(size_t parameter) const { return places_[parameter].storage; }
  // Parameters of these pages that were given other memory take its values and live in their page
  // again. REQUIRES: sharded ones are pinned. Returns what is wrong with one that could not, or "".
  std::string put_back(const std::vector<size_t>& pages) const;

 private:
  void put_back(size_t parameter, std::string& wrong) const;

  const std::shared_ptr<const ParameterPages> pages_;
  const std::shared_ptr<const PageMemory> memory_;
  // Where a parameter is in its page.
  struct Place {
    const c10::StorageImpl* storage = nullptr;  // kept by in_place_
    const void* first = nullptr;                // its first element; null where it has no address
  };

  std::vector<at::Tensor>
      in_place_;               // by parameter: its elements, whatever memory it is given later
  std::vector<Place> places_;  // by parameter
};

}  // namespace zeropage::zero
