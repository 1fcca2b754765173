#include "offload/nvme_file.h"

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <utility>

#include <ATen/ops/empty.h>

#include "offload/detail/record_store.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace zeropage::offload {
namespace {

using detail::StoredRecord;
using memory::format_bytes;

std::vector<std::shared_ptr<StoredRecord>> lay_out(const NvmeFileOptions& options,
                                                   const std::vector<int64_t>& record_bytes) {
  ZP_CHECK(options.record_names.empty() || options.record_names.size() == record_bytes.size(),
           "NvmeFile for ", options.owner, ": expected a name for each of ", record_bytes.size(),
           " records or none, got ", options.record_names.size());
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
      store_(std::make_unique<detail::RecordStore>(options, end_of(records_))) {
  for (const auto& record : records_) {
    largest_buffer_bytes_ = std::max(largest_buffer_bytes_, record->buffer_bytes());
  }
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
  return store_->path();
}

memory::Pending NvmeFile::start_read(size_t record, const at::Tensor& buffer) {
  at(record, "start_read");
  return store_->start(detail::Direction::kRead, records_[record], buffer);
}

memory::Pending NvmeFile::start_write(size_t record, const at::Tensor& buffer) {
  at(record, "start_write");
  return store_->start(detail::Direction::kWrite, records_[record], buffer);
}

NvmeStatistics NvmeFile::statistics() const {
  return store_->statistics();
}

std::string NvmeFile::describe() const {
  return c10::str(path(), ": ", records(), " records, ", store_->describe());
}

}  // namespace zeropage::offload
