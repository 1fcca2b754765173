// The table of NvmeActivationsOptions (memory/fields.h), as zero/option_fields.h.
#pragma once

#include "memory/fields.h"
#include "zero/tiers/nvme_activations.h"

namespace zeropage {

constexpr auto table_of(std::type_identity<NvmeActivationsOptions>) {
  using memory::field, memory::kBytes;
  return std::tuple(memory::section(
      "Activations on NVMe",
      field<&NvmeActivationsOptions::directory>(
          {.help = "The folder on a local disk; may be all ranks'"}),
      field<&NvmeActivationsOptions::rank>({.help = "Of the world, for the file's name"}),
      field<&NvmeActivationsOptions::writing_bytes>(
          {.help = "The most that is on its way to the device at once; what is larger goes alone",
           .unit = kBytes})));
}
static_assert(memory::tells_all_fields<NvmeActivationsOptions>());

}  // namespace zeropage
