// The table of NvmeActivationsOptions (zeropage/fields.h), as zeropage/option_fields.h.
#pragma once

#include "zeropage/activation_offload.h"
#include "zeropage/fields.h"

namespace zeropage {

constexpr auto table_of(std::type_identity<NvmeActivationsOptions>) {
  using memory::field, memory::kBytes;
  return std::tuple(memory::section(
      "Activations on NVMe",
      field<&NvmeActivationsOptions::directory>(
          {.help = "Folder on a local disk; all ranks may share it"}),
      field<&NvmeActivationsOptions::rank>({.help = "Rank in the world, for the file's name"}),
      field<&NvmeActivationsOptions::writing_bytes>(
          {.help = "Most bytes on their way to the disk at once; a larger tensor goes alone",
           .unit = kBytes})));
}
static_assert(memory::tells_all_fields<NvmeActivationsOptions>());

}  // namespace zeropage
