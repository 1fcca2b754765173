// A record of a file: its place there, and what its last write left.
//
// Threads: name, offset and bytes are constant once it is given to a RecordWorker, whose thread owns
// the rest.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/exact.h"
#include "offload/nvme_options.h"

namespace zeropage::offload::detail {

struct StoredRecord {
  enum class State : uint8_t {
    kEmpty,  // never written
    kOnDevice,
    kOnHost,
    kLost,  // a write of it failed half way, and nothing took it in
  };

  std::string name;    // in messages
  int64_t offset = 0;  // -1: the file has no place for it
  int64_t bytes = 0;

  State state = State::kEmpty;
  uint64_t writes = 0;              // that began: the sequence number of the last
  std::vector<uint64_t> checksums;  // of the blocks of the last write
  std::vector<uint64_t>
      earlier_checksums;             // of the write before, to name a block that was not written
  at::Tensor host;                   // [bytes] where the state is kOnHost
  std::shared_ptr<void> host_share;  // ends, with the record, what is counted of it
  std::string failure;               // of kLost

  int64_t buffer_bytes() const { return base::round_up(bytes, kNvmeAlignment); }
};

}  // namespace zeropage::offload::detail
