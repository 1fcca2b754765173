// Tensors of an accelerator over the communicator of a host, through page-locked host memory: for
// ranks that share a device, and where NCCL cannot be had. The bits are the host communicator's.
//
// An operation on a tensor there waits, on a thread of its own, for what was enqueued before the
// call, copies to the host what this rank gives, lets the host communicator work, and copies back
// what has changed. Who waits for its Pending blocks until the copy back is enqueued. Tensors on the
// host go to the host communicator as they are, in the same order as the others.
//
// Memory: one staging buffer as large as the largest operation so far, charged as kStaging by the
// ledger that is current where the communicator is made.
//
// Lifetime: a tensor's memory is reused in the order of the stream that it was allocated on, which
// knows of the copies only once it has waited; so every Pending must be waited for.
#pragma once

#include <memory>

#include <c10/core/Device.h>

#include "zeropage/communicator.h"

namespace zeropage::comm {

// host: moves tensors of the host. device: an accelerator, with its index.
std::unique_ptr<Communicator> make_staged_communicator(std::unique_ptr<Communicator> host,
                                                       c10::Device device);

}  // namespace zeropage::comm
