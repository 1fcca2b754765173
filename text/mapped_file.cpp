#include "text/mapped_file.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "zeropage/text/text_error.h"

namespace zeropage::text {
namespace {

// Closes what was opened, also where mapping it throws.
struct Descriptor {
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
  int number = -1;
};

[[noreturn]] void call_failed(const std::string& name, const char* call) {
  throw TextError(name, std::string(call) + ": " + std::strerror(errno));
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) : name_(path.string()) {
  const Descriptor file{::open(name_.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.number < 0) call_failed(name_, "cannot be opened");
  struct stat status {};
  if (::fstat(file.number, &status) != 0) call_failed(name_, "fstat");
  if (!S_ISREG(status.st_mode)) throw TextError(name_, "expected a file, got something else");
  const auto size = static_cast<size_t>(status.st_size);
  if (size == 0) return;
  void* const memory = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.number, 0);
  if (memory == MAP_FAILED) call_failed(name_, "cannot be mapped");
  bytes_ = {static_cast<const char*>(memory), size};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<char*>(bytes_.data()), bytes_.size());
}

}  // namespace zeropage::text
