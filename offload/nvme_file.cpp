#include "offload/nvme_file.h"

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <utility>

#include <ATen/ops/empty.h>

#include "memory/bytes.h"
#include "memory/check.h"
#include "offload/detail/record_worker.h"
#include "offload/detail/scratch_file.h"

namespace zeropage::offload {
namespace {

using detail::Direction;
using detail::StoredRecord;
using memory::format_bytes;

std::vector<std::shared_ptr<StoredRecord>> lay_out(const NvmeFileOptions& options,
                                                   const std::vector<int64_t>& record_bytes) {
  ZP_CHECK(options.record_names.empty() || options.record_names.size() == record_bytes.size(),
           "NvmeFile for ", options.owner, ": expected a name for each of ", record_bytes.size(),
           " records or none, got ", options.record_names.size());
  ZP_CHECK(options.block_bytes > 0 && options.block_bytes % kNvmeAlignment == 0 &&
               options.block_bytes <= int64_t{1} << 30,
           "NvmeFile for ", options.owner, ": expected block_bytes to be a multiple of ",
           kNvmeAlignment, " up to 1 GiB, got ", options.block_bytes);
  ZP_CHECK(options.queue_depth >= 1 && options.queue_depth <= 1024, "NvmeFile for ", options.owner,
           ": expected a queue_depth of 1 to 1024, got ", options.queue_depth);
  std::vector<std::shared_ptr<StoredRecord>> records;
  int64_t offset = 0;
  for (const int64_t bytes : record_bytes) {
    ZP_CHECK(bytes >= 0, "NvmeFile for ", options.owner, ": record ", records.size(), " has ",
             bytes, " bytes; expected 0 or more");
    auto record = std::make_shared<StoredRecord>();
    record->name = options.record_names.empty() ? c10::str("record ", records.size())
                                                : options.record_names[records.size()];
    record->offset = offset;
    record->bytes = bytes;
    offset += record->buffer_bytes();
    records.push_back(std::move(record));
  }
  return records;
}

int64_t end_of(const std::vector<std::shared_ptr<StoredRecord>>& records) {
  return records.empty() ? 0 : records.back()->offset + records.back()->buffer_bytes();
}

std::unique_ptr<detail::BlockDevice> open_device(const NvmeFileOptions& options, int descriptor) {
  std::string refusal;
  std::unique_ptr<detail::BlockDevice> device;
  if (options.engine != NvmeEngine::kThreads) {
    device = detail::make_uring_device(descriptor, options.queue_depth, refusal);
  }
  ZP_CHECK(device || options.engine != NvmeEngine::kIoUring, "NvmeFile for ", options.owner,
           ": the kernel refuses io_uring (", refusal,
           "); allow it, or use NvmeEngine::kAutomatic");
  if (!device) device = detail::make_thread_device(descriptor, options.queue_depth, refusal);
  return options.wrap ? options.wrap(std::move(device)) : std::move(device);
}

}  // namespace

std::string to_string(const NvmeStatistics& statistics) {
  std::ostringstream out;
  out << format_bytes(statistics.bytes_read) << " read, " << format_bytes(statistics.bytes_written)
      << " written (" << statistics.records_read << " and " << statistics.records_written
      << " records, " << (statistics.direct ? "direct" : "through the page cache") << "); waited "
      << statistics.waited_seconds << " s, checksums " << statistics.checksum_seconds << " s";
  if (statistics.retries > 0) out << "; " << statistics.retries << " retries";
  if (statistics.demoted_records > 0) {
    out << "; " << statistics.demoted_records << " records ("
        << format_bytes(statistics.demoted_bytes) << ") in host memory, as their writes failed";
  }
  return out.str();
}

at::Tensor make_buffer(int64_t bytes) {
  const memory::KindScope kind(memory::Kind::kStaging);
  const at::Tensor memory = at::empty({bytes + kNvmeAlignment}, at::kByte);
  const auto address = reinterpret_cast<uintptr_t>(memory.const_data_ptr());
  const auto past = static_cast<int64_t>(address % kNvmeAlignment);
  return memory.narrow(0, past == 0 ? 0 : kNvmeAlignment - past, bytes);
}

NvmeFile::NvmeFile(const NvmeFileOptions& options, const std::vector<int64_t>& record_bytes)
    : records_(lay_out(options, record_bytes)),
      file_(std::make_unique<detail::ScratchFile>(options.directory, options.name, options.owner,
                                                  end_of(records_))) {
  for (const auto& record : records_) {
    largest_buffer_bytes_ = std::max(largest_buffer_bytes_, record->buffer_bytes());
  }
  detail::WorkerOptions worker;
  worker.path = file_->path();
  worker.owner = options.owner;
  worker.block_bytes = options.block_bytes;
  worker.direct = file_->direct();
  worker.host_bytes_allowed = options.host_bytes_allowed;
  worker.kind = options.kind;
  worker_ = std::make_unique<detail::RecordWorker>(open_device(options, file_->descriptor()),
                                                   std::move(worker));
}

NvmeFile::~NvmeFile() = default;

const StoredRecord& NvmeFile::at(size_t record, const char* verb) const {
  ZP_CHECK(record < records_.size(), "NvmeFile::", verb, " of ", path(),
           ": expected a record of 0 to ", static_cast<int64_t>(records_.size()) - 1, ", got ",
           record);
  return *records_[record];
}

int64_t NvmeFile::record_bytes(size_t record) const {
  return at(record, "record_bytes").bytes;
}

int64_t NvmeFile::buffer_bytes(size_t record) const {
  return at(record, "buffer_bytes").buffer_bytes();
}

int64_t NvmeFile::largest_buffer_bytes() const {
  return largest_buffer_bytes_;
}

int64_t NvmeFile::offset(size_t record) const {
  return at(record, "offset").offset;
}

const std::string& NvmeFile::path() const {
  return file_->path();
}

memory::Pending NvmeFile::start_read(size_t record, const at::Tensor& buffer) {
  check_buffer(at(record, "start_read"), buffer);
  return worker_->start(Direction::kRead, records_[record], buffer);
}

memory::Pending NvmeFile::start_write(size_t record, const at::Tensor& buffer) {
  check_buffer(at(record, "start_write"), buffer);
  return worker_->start(Direction::kWrite, records_[record], buffer);
}

void NvmeFile::check_buffer(const StoredRecord& record, const at::Tensor& buffer) const {
  ZP_CHECK(buffer.defined() && buffer.is_cpu() && buffer.scalar_type() == at::kByte &&
               buffer.dim() == 1 && buffer.is_contiguous(),
           "buffer for ", record.name, " of ", path(),
           ": expected a flat, contiguous uint8 tensor on the host");
  ZP_CHECK(buffer.numel() >= record.buffer_bytes(), "buffer for ", record.name, " of ", path(),
           ": expected ", record.buffer_bytes(), " bytes or more, got ", buffer.numel());
  ZP_CHECK(reinterpret_cast<uintptr_t>(buffer.const_data_ptr()) % kNvmeAlignment == 0,
           "buffer for ", record.name, " of ", path(),
           ": expected an address that is a multiple of ", kNvmeAlignment,
           "; make_buffer() gives one");
}

NvmeStatistics NvmeFile::statistics() const {
  return worker_->statistics();
}

std::string NvmeFile::describe() const {
  return c10::str(path(), ": ", records(), " records, ", format_bytes(file_->bytes()), "; ",
                  worker_->describe());
}

}  // namespace zeropage::offload
