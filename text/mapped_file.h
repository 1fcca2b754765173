// A file's bytes, mapped read-only into memory.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace zeropage::text {

class MappedFile {
 public:
  // Throws TextError where the file is missing, a folder, or cannot be opened. An empty file has no bytes.
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& name() const { return name_; }
  std::string_view bytes() const { return bytes_; }

 private:
  const std::string name_;
  std::string_view bytes_;
};

}  // namespace zeropage::text
