#include "zero/update/upload_buffers.h"

#include "zeropage/ledger.h"

namespace zeropage::zero {

UploadBuffers::Buffer& UploadBuffers::next(int64_t bytes, TierStorage& storage) {
  Buffer& buffer = buffers_[given_++ % buffers_.size()];
  buffer.up.synchronize();
  buffer.up = {};
  if (!buffer.memory.defined()) {
    buffer.memory = storage.add(/*page=*/0, bytes, at::kByte, 0, memory::Kind::kStaging);
  }
  return buffer;
}

}  // namespace zeropage::zero
