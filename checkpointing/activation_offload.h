// Activations on the host from forward to backward, without a change to any module.
//
//   checkpointing::ActivationOffload offload;
//   for (...) {
//     at::Tensor loss;
//     {
//       checkpointing::SavedTensorScope scope(offload.hooks());
//       loss = criterion(model(input), target);       // what autograd saves leaves
//     }
//     loss.backward();                                // and comes back where a node needs it
//   }
//
// What leaves: strided tensors from least_bytes on, with the memory that they lie in (their extent,
// or all of a storage that they have holes in), once for all tensors that are saved of it. What
// stays is kept as without hooks: leaves that require a gradient and views of them, sharded
// parameters, what stay_here() was told, and what is not a plain tensor. The enclosing scope's hooks
// are not asked.
//
// On an accelerator a copy runs on a stream of its own to page-locked memory, and the source goes
// when it has ended. Backward brings a tensor back on another stream, and then those that were saved
// before it, as far ahead as staging_bytes allows. On the host the copies run in the caller, at
// need: there ahead would only mean earlier. What the program still holds is not brought back but
// used (only if it is not compressed, so that bits do not depend on time).
//
// With a store (OffloadOptions) copies go on from the host to it, and are read ahead as they are
// fetched ahead.
//
// Bytes: copies are kActivationOffloaded on the host, what is brought back kActivation, of the
// ledger that is current where the ActivationOffload is made.
//
// A tensor that was changed in place after it was saved is refused in backward, as without hooks: on
// an accelerator its copy may have been under way. What LibTorch does not count as a change (through
// data(), or another tensor on the same memory) is not seen, and may be taken for the first values.
//
// Lifetime: hooks and graphs may outlive it. A copy goes with the last PackedTensor that needs it:
// when backward has run, or its graph is dropped.
// Threads: any; one thread may pack while another is in backward. Backward of an accelerator runs on
// the streams of its forward, as autograd has it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "checkpointing/activation_store.h"
#include "checkpointing/saved_tensors.h"

namespace zeropage::checkpointing {

namespace detail {
class Offloader;
}

// How activations are kept on the host. All but kNone change gradients.
enum class Compression : uint8_t {
  kNone,  // bit by bit
  kBf16,  // fp32 and fp64 as bfloat16: 2 bytes an element, off by up to 2^-8 of it
  k8Bit,  // all floating types as int8 with an fp32 scale for 256: 1.02 bytes an element, off by
          // up to 1/254 of the largest of its 256
};
std::string_view name(Compression compression);  // "none", "bf16", "8-bit"

struct OffloadOptions {
  // Saved tensors below stay: a copy of little costs more than it gives.
  int64_t least_bytes = int64_t{1} << 10;
  // The most device memory that is on its way out, and, apart from that, fetched ahead; a larger
  // tensor goes alone. More hides more, and is memory. 0: twice the largest that has left, and at
  // least 64 MiB.
  int64_t staging_bytes = 0;
  // Lossy unless kNone: not the gradients of a run without it.
  Compression compression = Compression::kNone;
  // Where copies lie; null: in host memory. On the host, too, they are then brought back ahead, with
  // staging_bytes of host memory.
  std::shared_ptr<ActivationStore> store = nullptr;
};

struct OffloadStatistics {
  Compression compression = Compression::kNone;
  int64_t saved_tensors = 0;          // that left
  int64_t copies = 0;                 // that they left in: fewer where they share memory
  std::string where = "on the host";  // or in a store: then host_* count what lies there
  int64_t host_bytes = 0;             // of copies, now
  int64_t host_peak_bytes = 0;        // the most that was
  int64_t host_total_bytes = 0;       // of all copies so far
  int64_t fetched_bytes = 0;          // brought back, as they were before compression
  int64_t fetched_ahead_bytes = 0;  // of them, those that were on their way before they were needed
  int64_t most_leaving_bytes = 0;   // that were on their way out at once; 0 on the host
  int64_t most_ahead_bytes = 0;     // that were fetched ahead at once; 0 on the host
  double waited_seconds = 0;        // of the threads that pack, for earlier copies to end
};
// One line. Says that it is lossy if it is.
std::string to_string(const OffloadStatistics& statistics);

class ActivationOffload {
 public:
  // Throws if an option makes no sense.
  explicit ActivationOffload(const OffloadOptions& options = {});
  ~ActivationOffload();
  ActivationOffload(const ActivationOffload&) = delete;
  ActivationOffload& operator=(const ActivationOffload&) = delete;

  // For a SavedTensorScope, as often as wanted.
  std::shared_ptr<SavedTensorHooks> hooks() const;

  // What the program holds anyway, and saves without a gradient: frozen parameters, buffers. Not
  // told, they are right too, but are copied.
  void stay_here(const std::vector<at::Tensor>& tensors);

  OffloadStatistics statistics() const;

 private:
  const std::shared_ptr<detail::Offloader> offloader_;
};

}  // namespace zeropage::checkpointing
