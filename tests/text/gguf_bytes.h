// GGUF files as bytes, piece by piece, so that a test may make each piece wrong.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/text/text_files.h"

namespace zeropage::testing {

inline std::string gguf_string(const std::string& text) {
  return bytes_of(uint64_t{text.size()}) + text;
}

class GgufBytes {
 public:
  uint32_t version = 3;
  uint64_t alignment = 32;  // where the data begins, and each tensor; not written

  template <typename T>
  GgufBytes& pair(const std::string& key, uint32_t type, T value) {
    return raw_pair(key, type, bytes_of(value));
  }
  GgufBytes& words(const std::string& key, const std::string& value) {
    return raw_pair(key, 8, gguf_string(value));
  }
  GgufBytes& list_of_words(const std::string& key, const std::vector<std::string>& values) {
    std::string bytes = bytes_of(uint32_t{8}) + bytes_of(uint64_t{values.size()});
    for (const std::string& value : values) bytes += gguf_string(value);
    return raw_pair(key, 9, bytes);
  }
  template <typename T>
  GgufBytes& list(const std::string& key, uint32_t type, const std::vector<T>& values) {
    std::string bytes = bytes_of(type) + bytes_of(uint64_t{values.size()});
    for (const T& value : values) bytes += bytes_of(value);
    return raw_pair(key, 9, bytes);
  }
  GgufBytes& raw_pair(const std::string& key, uint32_t type, const std::string& value) {
    pairs_ += gguf_string(key) + bytes_of(type) + value;
    ++pair_count_;
    return *this;
  }

  // sizes: in the file's order, the innermost first.
  GgufBytes& tensor(const std::string& name, const std::vector<uint64_t>& sizes, uint32_t type,
                    const std::string& data) {
    data_.append((alignment - data_.size() % alignment) % alignment, '\0');
    return tensor_at(name, sizes, type, data_.size(), data);
  }
  GgufBytes& tensor_at(const std::string& name, const std::vector<uint64_t>& sizes, uint32_t type,
                       uint64_t offset, const std::string& data) {
    infos_ += gguf_string(name) + bytes_of(static_cast<uint32_t>(sizes.size()));
    for (const uint64_t size : sizes) infos_ += bytes_of(size);
    infos_ += bytes_of(type) + bytes_of(offset);
    data_ += data;
    ++tensor_count_;
    return *this;
  }

  std::string text() const {
    std::string bytes =
        "GGUF" + bytes_of(version) + bytes_of(tensor_count_) + bytes_of(pair_count_);
    bytes += pairs_ + infos_;
    bytes.append((alignment - bytes.size() % alignment) % alignment, '\0');
    return bytes + data_;
  }

 private:
  uint64_t pair_count_ = 0;
  uint64_t tensor_count_ = 0;
  std::string pairs_;
  std::string infos_;
  std::string data_;
};

}  // namespace zeropage::testing
