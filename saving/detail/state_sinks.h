// Where a rank's part of a file of tensors goes: to the disk at once, or to memory first.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "state/block_checksums.h"
#include "state/file_writer.h"

namespace zeropage::saving {

class StateSink {
 public:
  virtual ~StateSink() = default;
  StateSink(const StateSink&) = delete;
  StateSink& operator=(const StateSink&) = delete;

  // values: flat and contiguous, on any device. They are taken before it returns.
  void put(uint64_t offset, const at::Tensor& values);
  void put(uint64_t offset, std::string_view bytes);

 protected:
  StateSink() = default;

  // Where the file's bytes from `offset` on are to be put next: one element or more.
  virtual std::span<char> room(uint64_t offset) = 0;
  // The first bytes of the last room() are there.
  virtual void filled(uint64_t bytes) = 0;
};

// Through buffers of its own to the disk, with checksums.
class FileSink final : public StateSink {
 public:
  FileSink(const std::filesystem::path& file, bool direct_io);

  // Waits until all is on the disk. Returns the checksums.
  std::vector<state::ChecksumPiece> finish();

 private:
  static constexpr int kBuffers = 3;

  std::span<char> room(uint64_t offset) override;
  void filled(uint64_t bytes) override;
  void flush();

  const at::Tensor memory_;  // of the writer's buffers
  state::FileWriter writer_;
  state::PieceChecksums checksums_;
  std::span<char> room_;
  uint64_t begin_ = 0;  // of room_, in the file
  uint64_t filled_ = 0;
};

// Memory that states are copied to before they are written; kept from save to save, as memory that is
// touched first takes longer than the copy.
class StateStaging {
 public:
  // Bytes of a file that follow each other, in memory at the same place modulo 4096.
  struct Stretch {
    uint64_t offset;
    const char* bytes;
    uint64_t size;
  };

  // allocate: [bytes] of the host, for copies from the device.
  explicit StateStaging(std::function<at::Tensor(int64_t bytes)> allocate)
      : allocate_(std::move(allocate)) {}

  // What was staged is forgotten; about so many bytes come next.
  void clear(int64_t expected_bytes);
  // Room for what begins there in a file: one element or more.
  std::span<char> take(uint64_t offset_in_file);
  void commit(uint64_t bytes);

 private:
  struct Chunk {
    at::Tensor memory;
    uint64_t used = 0;
  };

  const std::function<at::Tensor(int64_t bytes)> allocate_;
  std::vector<Chunk> chunks_;
  size_t chunk_ = 0;  // that is being filled
  int64_t chunk_bytes_ = 0;
};

// Into staging.
class StagingSink final : public StateSink {
 public:
  explicit StagingSink(StateStaging& staging) : staging_(staging) {}

  const std::vector<StateStaging::Stretch>& stretches() const { return stretches_; }

 private:
  std::span<char> room(uint64_t offset) override;
  void filled(uint64_t bytes) override;

  StateStaging& staging_;
  std::span<char> room_;
  uint64_t end_ = 0;  // of what was put last, in the file
  std::vector<StateStaging::Stretch> stretches_;
};

// Writes what was staged. Returns its checksums once all is on the disk.
std::vector<state::ChecksumPiece> write_stretches(
    const std::filesystem::path& file, const std::vector<StateStaging::Stretch>& stretches,
    bool direct_io);

}  // namespace zeropage::saving
