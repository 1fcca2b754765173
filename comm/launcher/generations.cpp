#include "comm/launcher/generations.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <ctime>
#include <fcntl.h>
#include <stdexcept>
#include <sys/mman.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace zeropage::comm::detail {
namespace {

// "zpgener" and the layout's version.
constexpr uint64_t kGenerationsMagic = 0x7a7067656e657202;

struct RankWords {
  std::atomic<int32_t> joined{-1};
  std::atomic<int32_t> left{-1};
  std::atomic<int64_t> left_at{0};
  std::atomic<int32_t> blamed{-1};
  std::atomic<int32_t> finished{0};
};
static_assert(std::atomic<int32_t>::is_always_lock_free &&
              std::atomic<int64_t>::is_always_lock_free);

[[noreturn]] void fail_without_memory(const char* call) {
  throw std::system_error(errno, std::generic_category(),
                          std::string("zeropage launcher: no memory to share with ranks: ") + call);
}

}  // namespace

struct Generations::Memory {
  uint64_t magic;
  int32_t ranks;
  int32_t restarts;
  std::atomic<int32_t> current;
  std::atomic<int32_t> closed;
  std::array<GenerationBegin, kMostRestarts + 1> begins;
  // By generation, the rank + 1; 0: none.
  std::array<std::atomic<int32_t>, kMostRestarts + 1> out_of_memory;
  // Behind this lie the RankWords of all ranks.

  RankWords* words() { return reinterpret_cast<RankWords*>(this + 1); }
  const RankWords* words() const { return reinterpret_cast<const RankWords*>(this + 1); }
  static size_t bytes(int ranks) {
    return sizeof(Memory) + static_cast<size_t>(ranks) * sizeof(RankWords);
  }
};

std::string GenerationBegin::words() const {
  const std::string who = "rank " + std::to_string(rank);
  switch (cause) {
    case BeginCause::kStart:
      return "the first start";
    case BeginCause::kSignal:
      return who + " was killed by signal " + std::to_string(detail);
    case BeginCause::kExit:
      return who + " exited with code " + std::to_string(detail);
    case BeginCause::kLeft:
      return who + " left its loop with an error";
  }
  return who;
}

Generations Generations::create(int ranks, int restarts, int port) {
  FileDescriptor descriptor(::memfd_create("zeropage-generations", MFD_CLOEXEC));
  if (!descriptor.is_open()) fail_without_memory("memfd_create");
  const size_t bytes = Memory::bytes(ranks);
  if (::ftruncate(descriptor.get(), static_cast<off_t>(bytes)) != 0) {
    fail_without_memory("ftruncate");
  }
  void* const mapped =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor.get(), 0);
  if (mapped == MAP_FAILED) fail_without_memory("mmap");
  auto* const memory = new (mapped) Memory{};
  for (int rank = 0; rank < ranks; ++rank) {
    new (static_cast<void*>(memory->words() + rank)) RankWords();
  }
  memory->ranks = ranks;
  memory->restarts = restarts;
  memory->begins[0].port = port;
  memory->magic = kGenerationsMagic;
  return Generations(std::move(descriptor), mapped, bytes);
}

Generations Generations::open(const std::string& path) {
  const auto refuse = [&path](const std::string& why) {
    throw std::runtime_error(std::string(kGenerationsVariable) + "=" + path + ": " + why +
                             "; zp run --restarts sets it for the ranks that it starts");
  };
  FileDescriptor descriptor(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!descriptor.is_open()) refuse(std::generic_category().message(errno));
  struct stat status {};
  if (::fstat(descriptor.get(), &status) != 0) refuse(std::generic_category().message(errno));
  const auto bytes = static_cast<size_t>(status.st_size);
  if (bytes < Memory::bytes(1)) refuse("is too short");
  void* const mapped =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor.get(), 0);
  if (mapped == MAP_FAILED) refuse(std::generic_category().message(errno));
  Generations opened(std::move(descriptor), mapped, bytes);
  if (opened.memory().magic != kGenerationsMagic || bytes != Memory::bytes(opened.ranks())) {
    refuse("is not what a launcher of this version writes");
  }
  return opened;
}

Generations::Generations(FileDescriptor descriptor, void* memory, size_t bytes)
    : descriptor_(std::move(descriptor)), memory_(memory), bytes_(bytes) {}

Generations::Generations(Generations&& other) noexcept
    : descriptor_(std::move(other.descriptor_)),
      memory_(std::exchange(other.memory_, nullptr)),
      bytes_(other.bytes_) {}

Generations::~Generations() {
  if (memory_ != nullptr) ::munmap(memory_, bytes_);
}

std::string Generations::path() const {
  return "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(descriptor_.get());
}

int Generations::ranks() const {
  return memory().ranks;
}

int Generations::restarts() const {
  return memory().restarts;
}

int Generations::current() const {
  return memory().current.load();
}

GenerationBegin Generations::begin_of(int generation) const {
  return memory().begins.at(static_cast<size_t>(generation));
}

bool Generations::is_closed() const {
  return memory().closed.load() != 0;
}

void Generations::begin(const GenerationBegin& next) {
  const int generation = current() + 1;
  memory().begins.at(static_cast<size_t>(generation)) = next;
  memory().current.store(generation);
}

void Generations::note_resume(int generation, int64_t step) {
  GenerationBegin& begun = memory().begins.at(static_cast<size_t>(generation));
  begun.resumed_step = step;
  begun.resumed_at = monotonic_nanoseconds();
}

void Generations::close() {
  memory().closed.store(1);
}

void Generations::join(int rank, int generation) {
  memory().words()[rank].joined.store(generation);
}

void Generations::leave(int rank, int generation, int blamed) {
  memory().words()[rank].blamed.store(blamed);
  memory().words()[rank].left_at.store(monotonic_nanoseconds());
  memory().words()[rank].left.store(generation);
}

void Generations::note_out_of_memory(int rank, int generation) {
  int32_t none = 0;
  memory()
      .out_of_memory.at(static_cast<size_t>(generation))
      .compare_exchange_strong(none, rank + 1);
}

int Generations::out_of_memory(int generation) const {
  return memory().out_of_memory.at(static_cast<size_t>(generation)).load() - 1;
}

void Generations::finish(int rank) {
  memory().words()[rank].finished.store(1);
}

bool Generations::has_finished(int rank) const {
  return memory().words()[rank].finished.load() != 0;
}

int Generations::joined(int rank) const {
  return memory().words()[rank].joined.load();
}

int Generations::left(int rank) const {
  return memory().words()[rank].left.load();
}

int64_t Generations::left_at(int rank) const {
  return memory().words()[rank].left_at.load();
}

int Generations::blamed(int rank) const {
  const int rank_named = memory().words()[rank].blamed.load();
  return rank_named < ranks() ? rank_named : -1;
}

int64_t monotonic_nanoseconds() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace zeropage::comm::detail
