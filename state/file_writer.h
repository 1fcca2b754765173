// Writes stretches of a file that others write too, as fast as the disk takes them: a thread of its
// own writes one buffer past the page cache while the caller fills the next.
//
//   FileWriter writer(path, {});
//   for (...) {
//     const std::span<char> room = writer.room(offset);  // fill some of it
//     writer.write(n);
//   }
//   writer.finish();
//
// Past the page cache go whole sectors of 4 KiB; what is left at the ends of a stretch, which may share
// a sector with another writer's, goes through it. Where the file system takes no direct access, all
// does.
// Memory: options.buffers times options.buffer_bytes.
// Threads: one calls. Errors: room() and finish() throw StateError of a write that failed, and from then
// on nothing is written.
// Free of torch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>

namespace zeropage::state {

// Lowers the calling thread's priority on the processor and, if the disk's scheduler knows priorities, on the disk.
// Without the permission it does nothing.
void give_way();

struct FileWriterOptions {
  uint64_t buffer_bytes = 4 << 20;  // a multiple of 4096
  int buffers = 3;                  // 0: for write_from() alone
  // buffer_memory_bytes() of the caller's, at a multiple of 4096; null: its own.
  char* memory = nullptr;
  bool direct = true;
  // Whether its thread has a low priority.
  bool low_priority = false;

  // A stretch begins in a buffer where it does in its sector.
  uint64_t bytes_a_buffer() const { return buffer_bytes + 4096; }
  uint64_t buffer_memory_bytes() const { return static_cast<uint64_t>(buffers) * bytes_a_buffer(); }
};

class FileWriter {
 public:
  // The file is there, in its size.
  FileWriter(const std::filesystem::path& file, const FileWriterOptions& options);
  // Waits; what is written is on the disk only after finish().
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  // Where the bytes from `offset` on are to be put, one or more of them. Waits for a buffer.
  std::span<char> room(uint64_t offset);
  // The first `bytes` of the last room().
  void write(uint64_t bytes);
  // The same without a copy: memory that stays as it is until finish(). Its sectors go past the page cache
  // where it lies as in the file, modulo 4096.
  void write_from(uint64_t offset, const char* from, uint64_t bytes);
  // Waits until all is on the disk.
  void finish();

  bool is_direct() const;

 private:
  class Writer;
  std::unique_ptr<Writer> writer_;
};

}  // namespace zeropage::state
