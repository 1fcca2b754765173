#include "state/file_writer.h"

#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <mutex>
#include <new>
#include <optional>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "zeropage/saved_state.h"

namespace zeropage::state {
namespace {

constexpr uint64_t round_down(uint64_t value) {
  return value - value % kDirectAlignment;
}
constexpr uint64_t round_up(uint64_t value) {
  return round_down(value + kDirectAlignment - 1);
}

struct Free {
  void operator()(char* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, Free>;

Memory aligned_memory(uint64_t bytes) {
  auto* const memory = static_cast<char*>(std::aligned_alloc(kDirectAlignment, bytes));
  if (memory == nullptr) throw std::bad_alloc();
  return Memory(memory);
}

}  // namespace

void give_way() {
  constexpr int kOfProcess = 1;                   // IOPRIO_WHO_PROCESS
  constexpr int kLowestBestEffort = 2 << 13 | 7;  // IOPRIO_CLASS_BE
  static_cast<void>(::syscall(SYS_ioprio_set, kOfProcess, 0, kLowestBestEffort));
  static_cast<void>(::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), 19));
}

class FileWriter::Writer {
 public:
  Writer(const std::filesystem::path& file, const FileWriterOptions& options)
      : options_(options), file_(file, File::Access::kWrite) {
    if (options.direct && takes_direct_access(file)) {
      direct_.emplace(file, File::Access::kWrite, /*direct=*/true);
    }
    char* buffer = options.memory;
    if (buffer == nullptr && options.buffers > 0) {
      own_memory_ = aligned_memory(options.buffer_memory_bytes());
      buffer = own_memory_.get();
    }
    for (int i = 0; i < options.buffers; ++i) {
      idle_.push_back(buffer);
      buffer += options.bytes_a_buffer();
    }
    thread_ = std::thread([this] { run(); });
  }

  ~Writer() {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  bool is_direct() const { return direct_.has_value(); }

  std::span<char> room(uint64_t offset) {
    if (filling_ == nullptr) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !idle_.empty() || error_; });
      if (error_) std::rethrow_exception(error_);
      filling_ = idle_.back();
      idle_.pop_back();
    }
    room_ = offset;
    const uint64_t past = offset % kDirectAlignment;
    // Writes end at multiples of a buffer, whole sectors.
    return {filling_ + past, options_.buffer_bytes - offset % options_.buffer_bytes};
  }

  void write(uint64_t bytes) {
    char* const buffer = std::exchange(filling_, nullptr);
    add({room_, buffer + room_ % kDirectAlignment, bytes, buffer});
  }

  void write_from(uint64_t offset, const char* from, uint64_t bytes) {
    add({offset, from, bytes, nullptr});
  }

  void finish() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return (tasks_.empty() && !writing_) || error_; });
    if (error_) std::rethrow_exception(error_);
    lock.unlock();
    file_.sync();
  }

 private:
  struct Task {
    uint64_t offset = 0;
    const char* from = nullptr;
    uint64_t bytes = 0;
    char* buffer = nullptr;  // that `from` is in, or null
  };

  void add(const Task& task) {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(task);
    }
    changed_.notify_all();
  }

  void run() {
    if (options_.low_priority) give_way();
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return ends_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const Task task = tasks_.front();
      tasks_.pop_front();
      writing_ = true;
      lock.unlock();
      std::exception_ptr error;
      try {
        if (!error_) perform(task);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      writing_ = false;
      if (error) error_ = error;
      if (task.buffer != nullptr) idle_.push_back(task.buffer);
      changed_.notify_all();
    }
  }

  void perform(const Task& task) {
    const uint64_t end = task.offset + task.bytes;
    const uint64_t begin_direct = round_up(task.offset);
    const uint64_t end_direct = round_down(end);
    const bool lies_alike =
        (reinterpret_cast<uintptr_t>(task.from) - task.offset) % kDirectAlignment == 0;
    if (!direct_ || !lies_alike || begin_direct >= end_direct) {
      file_.write(task.offset, task.from, task.bytes);
      return;
    }
    const auto at = [&](uint64_t offset) { return task.from + (offset - task.offset); };
    file_.write(task.offset, task.from, begin_direct - task.offset);
    direct_->write(begin_direct, at(begin_direct), end_direct - begin_direct);
    file_.write(end_direct, at(end_direct), end - end_direct);
  }

  const FileWriterOptions options_;
  File file_;
  std::optional<File> direct_;

  Memory own_memory_;

  // The caller's.
  char* filling_ = nullptr;
  uint64_t room_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_; only the thread sets error_.
  std::vector<char*> idle_;  // buffers
  std::deque<Task> tasks_;
  bool writing_ = false;
  bool ends_ = false;
  std::exception_ptr error_;

  std::thread thread_;  // last: it uses the others
};

FileWriter::FileWriter(const std::filesystem::path& file, const FileWriterOptions& options)
    : writer_(std::make_unique<Writer>(file, options)) {}
FileWriter::~FileWriter() = default;

std::span<char> FileWriter::room(uint64_t offset) {
  return writer_->room(offset);
}
void FileWriter::write(uint64_t bytes) {
  writer_->write(bytes);
}
void FileWriter::write_from(uint64_t offset, const char* from, uint64_t bytes) {
  writer_->write_from(offset, from, bytes);
}
void FileWriter::finish() {
  writer_->finish();
}
bool FileWriter::is_direct() const {
  return writer_->is_direct();
}

}  // namespace zeropage::state
