#include "saving/detail/state_sinks.h"

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>

#include "zeropage/ledger.h"
#include "zeropage/saved_state.h"

namespace zeropage::saving {
namespace {

constexpr uint64_t kWriteBytes = 4 << 20;

// Sizes of a chunk of staging: one chunk for a small state, several of one size for a large one.
constexpr int64_t kLeastChunk = 1 << 20;
constexpr int64_t kMostChunk = 64 << 20;
constexpr int64_t kMostSkipped = 256 << 10;  // between stretches

// To the next address that direct access takes.
uint64_t to_alignment(const char* address) {
  const uint64_t past = reinterpret_cast<uintptr_t>(address) % state::kDirectAlignment;
  return past == 0 ? 0 : state::kDirectAlignment - past;
}

at::Tensor make_memory(uint64_t bytes) {
  const memory::KindScope kind(memory::Kind::kStaging);
  return at::empty({static_cast<int64_t>(bytes + state::kDirectAlignment)}, at::kByte);
}

char* aligned(const at::Tensor& memory) {
  auto* const begin = static_cast<char*>(memory.mutable_data_ptr());
  return begin + to_alignment(begin);
}

state::FileWriterOptions writer_options(int buffers, bool direct_io) {
  state::FileWriterOptions options;
  options.buffer_bytes = kWriteBytes;
  options.buffers = buffers;
  options.direct = direct_io;
  return options;
}

state::FileWriterOptions writer_options_in(const at::Tensor& memory, int buffers, bool direct_io) {
  state::FileWriterOptions options = writer_options(buffers, direct_io);
  options.memory = aligned(memory);
  return options;
}

}  // namespace

void StateSink::put(uint64_t offset, std::string_view bytes) {
  while (!bytes.empty()) {
    const std::span<char> to = room(offset);
    const uint64_t here = std::min<uint64_t>(to.size(), bytes.size());
    std::memcpy(to.data(), bytes.data(), here);
    filled(here);
    offset += here;
    bytes.remove_prefix(here);
  }
}

void StateSink::put(uint64_t offset, const at::Tensor& values) {
  if (values.is_cpu()) {
    put(offset, {static_cast<const char*>(values.const_data_ptr()), values.nbytes()});
    return;
  }
  const auto size = static_cast<uint64_t>(values.element_size());
  int64_t begin = 0;
  while (begin < values.numel()) {
    const std::span<char> to = room(offset);
    const int64_t here = std::min(static_cast<int64_t>(to.size() / size), values.numel() - begin);
    at::from_blob(to.data(), {here}, at::TensorOptions(values.scalar_type()))
        .copy_(values.narrow(0, begin, here));
    filled(static_cast<uint64_t>(here) * size);
    offset += static_cast<uint64_t>(here) * size;
    begin += here;
  }
}

FileSink::FileSink(const std::filesystem::path& file, bool direct_io)
    : memory_(make_memory(writer_options(kBuffers, direct_io).buffer_memory_bytes())),
      writer_(file, writer_options_in(memory_, kBuffers, direct_io)) {}

std::span<char> FileSink::room(uint64_t offset) {
  if (room_.empty() || offset != begin_ + filled_ || filled_ == room_.size()) {
    flush();
    room_ = writer_.room(offset);
    begin_ = offset;
  }
  return room_.subspan(filled_);
}

void FileSink::filled(uint64_t bytes) {
  filled_ += bytes;
}

void FileSink::flush() {
  if (filled_ == 0) return;
  checksums_.add(begin_, room_.data(), filled_);
  writer_.write(filled_);
  room_ = {};
  filled_ = 0;
}

std::vector<state::ChecksumPiece> FileSink::finish() {
  flush();
  writer_.finish();
  return checksums_.pieces();
}

void StateStaging::clear(int64_t expected_bytes) {
  chunk_bytes_ = std::clamp(expected_bytes + kMostSkipped, kLeastChunk, kMostChunk);
  for (Chunk& chunk : chunks_) chunk.used = 0;
  chunk_ = 0;
}

std::span<char> StateStaging::take(uint64_t offset_in_file) {
  while (true) {
    if (chunk_ == chunks_.size()) chunks_.push_back({allocate_(chunk_bytes_)});
    Chunk& chunk = chunks_[chunk_];
    auto* const free = static_cast<char*>(chunk.memory.mutable_data_ptr()) + chunk.used;
    // Whole sectors are written from where they lie.
    const uint64_t skipped = to_alignment(free) + offset_in_file % state::kDirectAlignment;
    const auto size = static_cast<uint64_t>(chunk.memory.numel());
    if (chunk.used + skipped + sizeof(double) <= size) {
      chunk.used += skipped;
      return {free + skipped, size - chunk.used};
    }
    ++chunk_;
  }
}

void StateStaging::commit(uint64_t bytes) {
  chunks_[chunk_].used += bytes;
}

std::span<char> StagingSink::room(uint64_t offset) {
  if (room_.size() >= sizeof(double) && offset == end_) return room_;
  room_ = staging_.take(offset);
  end_ = offset;
  stretches_.push_back({offset, room_.data(), 0});
  return room_;
}

void StagingSink::filled(uint64_t bytes) {
  staging_.commit(bytes);
  stretches_.back().size += bytes;
  room_ = room_.subspan(bytes);
  end_ += bytes;
}

std::vector<state::ChecksumPiece> write_stretches(
    const std::filesystem::path& file, const std::vector<StateStaging::Stretch>& stretches,
    bool direct_io) {
  state::FileWriterOptions options = writer_options(/*buffers=*/0, direct_io);
  options.low_priority = true;
  state::FileWriter writer(file, options);
  state::PieceChecksums checksums;
  for (const StateStaging::Stretch& stretch : stretches) {
    for (uint64_t begin = 0; begin < stretch.size;) {
      const uint64_t offset = stretch.offset + begin;
      const uint64_t here = std::min(kWriteBytes - offset % kWriteBytes, stretch.size - begin);
      // The disk is busy with it while its checksum is computed.
      writer.write_from(offset, stretch.bytes + begin, here);
      checksums.add(offset, stretch.bytes + begin, here);
      begin += here;
    }
  }
  writer.finish();
  return checksums.pieces();
}

}  // namespace zeropage::saving
