#include "zeropage/saved_state.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <system_error>

#include "state/block_checksums.h"

namespace zeropage::state {
namespace {

std::string words_of(uint32_t crc) {
  std::array<char, 24> words{};
  std::snprintf(words.data(), words.size(), "CRC-32C %08x", crc);
  return words.data();
}

// Refuses a file of another size before anything of it is believed.
uint64_t size_as_expected(const File& file, const FileEntry& entry) {
  if (file.size() != entry.bytes) {
    throw StateError(file.name(), std::min(file.size(), entry.bytes),
                     std::to_string(entry.bytes) + " bytes", std::to_string(file.size()),
                     "the file was cut, or is of another state");
  }
  return entry.bytes;
}

Manifest manifest_in(const std::filesystem::path& directory) {
  std::error_code unknown;
  if (!std::filesystem::exists(directory / kManifestFile, unknown) && !unknown) {
    throw StateError(directory.string(), 0,
                     std::string("expected ") + kManifestFile +
                         " in it, got none; it is no state, or its save did not end");
  }
  return read_manifest(File(directory / kManifestFile, File::Access::kRead));
}

}  // namespace

TensorFile::TensorFile(const std::filesystem::path& path, const FileEntry& entry)
    : entry_(entry), file_(path, File::Access::kRead) {
  size_as_expected(file_, entry_);
  // The header's blocks first: an error then says "damaged", not what a flipped bit made of it.
  constexpr uint64_t kLengthBytes = 8;
  std::vector<char> block(std::clamp(entry_.bytes, kLengthBytes, kBlockBytes));
  uint64_t checked = read_block(0, block.data());
  uint64_t header_bytes = 0;
  for (size_t i = kLengthBytes; i-- > 0;)
    header_bytes = header_bytes << 8 | static_cast<uint8_t>(block[i]);
  for (uint64_t next = 1; next < blocks() && checked < header_bytes + kLengthBytes; ++next) {
    checked += read_block(next, block.data());
  }
  header_ = read_safetensors_header(file_);
  for (size_t i = 0; i < header_.tensors.size(); ++i) by_name_.emplace(header_.tensors[i].name, i);
}

const TensorEntry* TensorFile::find(const std::string& tensor) const {
  const auto found = by_name_.find(tensor);
  return found == by_name_.end() ? nullptr : &header_.tensors[found->second];
}

uint64_t TensorFile::read_block(uint64_t block, char* to) const {
  const uint64_t begin = block * kBlockBytes;
  if (block >= blocks()) {
    throw StateError(name(), entry_.bytes, "a block of the file", "its end", "the file was cut");
  }
  const uint64_t bytes = std::min(kBlockBytes, entry_.bytes - begin);
  file_.read(begin, to, bytes);
  const uint32_t found = crc32c(to, bytes);
  if (found != entry_.blocks[block]) {
    throw StateError(name(), begin,
                     "the block of " + std::to_string(bytes) + " bytes that was written there, " +
                         words_of(entry_.blocks[block]),
                     "another one, " + words_of(found), "the file is damaged, or of another state");
  }
  return bytes;
}

BlockReader::BlockReader(const TensorFile& file) : file_(file), block_(kBlockBytes) {}

void BlockReader::read(uint64_t begin, uint64_t end, char* to) {
  begin += file_.header().data_begin;
  end += file_.header().data_begin;
  while (begin < end) {
    const uint64_t block = begin / kBlockBytes;
    const uint64_t within = begin % kBlockBytes;
    const uint64_t bytes = std::min(end - begin, kBlockBytes - within);
    if (current_ != block) {
      current_.reset();
      bytes_ = file_.read_block(block, block_.data());
      current_ = block;
    }
    if (within + bytes > bytes_) {
      throw StateError(file_.name(), begin, "bytes of a tensor", "the end of the file");
    }
    std::memcpy(to, block_.data() + within, bytes);
    begin += bytes;
    to += bytes;
  }
}

SavedState::SavedState(const std::filesystem::path& directory)
    : directory_(directory), manifest_(manifest_in(directory)) {
  weights_ = open(kWeightsFile);
  if (weights_ == nullptr) {
    throw StateError((directory / kManifestFile).string(), 0, kWeightsFile, "none",
                     "it is no manifest of a state");
  }
  optimizer_ = open(kOptimizerFile);
}

std::unique_ptr<TensorFile> SavedState::open(const std::string& name) const {
  const FileEntry* const entry = manifest_.file(name);
  return entry == nullptr ? nullptr : std::make_unique<TensorFile>(directory_ / name, *entry);
}

std::vector<const TensorFile*> SavedState::files() const {
  std::vector<const TensorFile*> all = {weights_.get()};
  if (optimizer_) all.push_back(optimizer_.get());
  return all;
}

uint64_t SavedState::verify(uint64_t part, uint64_t parts,
                            const std::function<void(uint64_t bytes)>& progress) const {
  std::vector<char> to;
  uint64_t bytes = 0;
  for (const TensorFile* file : files()) {
    to.resize(std::max<uint64_t>(to.size(), std::min(kBlockBytes, file->bytes())));
    for (uint64_t block = part; block < file->blocks(); block += parts) {
      bytes += file->read_block(block, to.data());
      if (progress) progress(bytes);
    }
  }
  return bytes;
}

}  // namespace zeropage::state
