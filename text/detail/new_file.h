// A file that gets its name when all of it is written: until then it lies beside it under another one, and is gone with the
// object.
#pragma once

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string_view>

namespace zeropage::text::detail {

class NewFile {
 public:
  // Creates it, so that a folder that cannot be written to is named at once. Throws TextError.
  explicit NewFile(std::filesystem::path path);
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(std::string_view bytes);
  // The first bytes once more.
  void write_beginning(std::string_view bytes);
  // Waits until it is on the disk.
  void sync();
  // Gives it its name; a file of that name is replaced.
  void publish();

 private:
  [[noreturn]] void fail(const char* call) const;

  const std::filesystem::path path_;
  const std::filesystem::path temporary_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

}  // namespace zeropage::text::detail
