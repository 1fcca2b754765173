#include "offload/detail/record_store.h"

#include <cstdint>
#include <utility>

#include "offload/detail/wrapped_disk.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace zeropage::offload::detail {
namespace {

std::unique_ptr<BlockDevice> open_device(const NvmeFileOptions& options, int descriptor) {
  std::string refusal;
  std::unique_ptr<BlockDevice> device;
  if (options.engine != NvmeEngine::kThreads) {
    device = make_uring_device(descriptor, options.queue_depth, refusal);
  }
  ZP_CHECK(device || options.engine != NvmeEngine::kIoUring, "NvmeFile for ", options.owner,
           ": the kernel refuses io_uring (", refusal,
           "); allow it, or use NvmeEngine::kAutomatic");
  if (!device) device = make_thread_device(descriptor, options.queue_depth, refusal);
  return WrappedDisk::in_place_of(std::move(device), options.directory);
}

WorkerOptions worker_options(const NvmeFileOptions& options, const ScratchFile& file) {
  WorkerOptions worker;
  worker.path = file.path();
  worker.owner = options.owner;
  worker.block_bytes = options.block_bytes;
  worker.direct = file.direct();
  worker.host_bytes_allowed = options.host_bytes_allowed;
  worker.kind = options.kind;
  return worker;
}

const NvmeFileOptions& checked(const NvmeFileOptions& options) {
  ZP_CHECK(options.block_bytes > 0 && options.block_bytes % kNvmeAlignment == 0 &&
               options.block_bytes <= int64_t{1} << 30,
           "NvmeFile for ", options.owner, ": expected block_bytes to be a multiple of ",
           kNvmeAlignment, " up to 1 GiB, got ", options.block_bytes);
  ZP_CHECK(options.queue_depth >= 1 && options.queue_depth <= 1024, "NvmeFile for ", options.owner,
           ": expected a queue_depth of 1 to 1024, got ", options.queue_depth);
  return options;
}

}  // namespace

RecordStore::RecordStore(const NvmeFileOptions& options, int64_t bytes)
    : file_(checked(options).directory, options.name, options.owner, bytes),
      worker_(open_device(options, file_.descriptor()), worker_options(options, file_)) {}

memory::Pending RecordStore::start(Direction direction, const std::shared_ptr<StoredRecord>& record,
                                   const at::Tensor& buffer) {
  ZP_CHECK(buffer.defined() && buffer.is_cpu() && buffer.scalar_type() == at::kByte &&
               buffer.dim() == 1 && buffer.is_contiguous(),
           "buffer for ", record->name, " of ", path(),
           ": expected a flat, contiguous uint8 tensor on the host");
  ZP_CHECK(buffer.numel() >= record->buffer_bytes(), "buffer for ", record->name, " of ", path(),
           ": expected ", record->buffer_bytes(), " bytes or more, got ", buffer.numel());
  ZP_CHECK(reinterpret_cast<uintptr_t>(buffer.const_data_ptr()) % kNvmeAlignment == 0,
           "buffer for ", record->name, " of ", path(),
           ": expected an address that is a multiple of ", kNvmeAlignment,
           "; make_buffer() gives one");
  return worker_.start(direction, record, buffer);
}

std::string RecordStore::describe() const {
  return c10::str(memory::format_bytes(file_.bytes()), "; ", worker_.describe());
}

}  // namespace zeropage::offload::detail
