#include "text/detail/new_file.h"

#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <unistd.h>
#include <utility>

#include "zeropage/text/text_error.h"

namespace zeropage::text::detail {

NewFile::NewFile(std::filesystem::path path)
    : path_(std::move(path)),
      temporary_(path_.string() + ".writing-" + std::to_string(::getpid())),
      file_(nullptr, &std::fclose) {
  if (std::filesystem::is_directory(path_)) {
    throw TextError(path_.string(), "expected the name of a file, got a folder");
  }
  file_.reset(std::fopen(temporary_.c_str(), "wb"));
  if (file_ == nullptr) fail("cannot be written");
}

NewFile::~NewFile() {
  if (file_ == nullptr) return;
  file_.reset();
  std::error_code ignored;
  std::filesystem::remove(temporary_, ignored);
}

void NewFile::fail(const char* call) const {
  throw TextError(path_.string(), std::string(call) + ": " + std::strerror(errno) +
                                      (errno == ENOSPC ? "; make room on that disk" : ""));
}

void NewFile::write(std::string_view bytes) {
  if (std::fwrite(bytes.data(), 1, bytes.size(), file_.get()) != bytes.size()) fail("write");
}

void NewFile::write_beginning(std::string_view bytes) {
  if (std::fseek(file_.get(), 0, SEEK_SET) != 0) fail("seek");
  write(bytes);
  if (std::fseek(file_.get(), 0, SEEK_END) != 0) fail("seek");
}

void NewFile::sync() {
  if (std::fflush(file_.get()) != 0) fail("write");
  if (::fsync(::fileno(file_.get())) != 0) fail("fsync");
}

void NewFile::publish() {
  sync();
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) fail("rename");
  file_.reset();
}

}  // namespace zeropage::text::detail
