#include "tools/weights_copy.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <unistd.h>

#include "state/file_writer.h"
#include "tools/state_words.h"
#include "zeropage/saved_state.h"
#include "zeropage/state_folder.h"

namespace zeropage::tools {
namespace {

namespace fs = std::filesystem;
using namespace state;

constexpr uint64_t kPanelBytes = 4 << 20;

std::string words_of(const std::vector<uint64_t>& shape) {
  return nlohmann::json(shape).dump();
}

// A file from its beginning to its end.
class Appender {
 public:
  explicit Appender(const fs::path& file) : writer_(file, {}) {}

  // fill(to, done, bytes): bytes [done, done + bytes) of what is appended.
  template <typename Fill>
  void append(uint64_t bytes, Fill fill) {
    for (uint64_t done = 0; done < bytes;) {
      const std::span<char> room = writer_.room(end_);
      const uint64_t here = std::min<uint64_t>(room.size(), bytes - done);
      fill(room.data(), done, here);
      checksums_.add(end_, room.data(), here);
      writer_.write(here);
      end_ += here;
      done += here;
    }
  }
  void append(const std::string& text) {
    append(text.size(),
           [&](char* to, uint64_t done, uint64_t bytes) { text.copy(to, bytes, done); });
  }
  PieceChecksums finish() {
    writer_.finish();
    return std::move(checksums_);
  }

 private:
  FileWriter writer_;
  PieceChecksums checksums_;
  uint64_t end_ = 0;
};

// Some columns at a time, which become rows.
void append_transposed(const CopiedTensor& tensor, const ReadData& read, Appender& file) {
  const uint64_t rows = tensor.from.shape[0];
  const uint64_t columns = tensor.from.shape[1];
  const uint64_t element = size_of(tensor.from.dtype);
  if (rows == 0 || columns == 0) return;
  std::vector<char> whole(bytes_of(tensor.from));  // [rows, columns]
  read(tensor.from.begin, tensor.from.end, whole.data());
  const uint64_t most = std::max<uint64_t>(1, kPanelBytes / (rows * element));
  std::vector<char> panel(std::min(most, columns) * rows * element);  // [columns of it, rows]
  for (uint64_t first = 0; first < columns; first += most) {
    const uint64_t here = std::min(most, columns - first);
    for (uint64_t row = 0; row < rows; ++row) {
      for (uint64_t column = 0; column < here; ++column) {
        std::memcpy(panel.data() + (column * rows + row) * element,
                    whole.data() + (row * columns + first + column) * element, element);
      }
    }
    file.append(here * rows * element, [&](char* to, uint64_t done, uint64_t bytes) {
      std::memcpy(to, panel.data() + done, bytes);
    });
  }
}

// Gives a file its name when it is whole.
class FileBeside {
 public:
  FileBeside(const fs::path& target, uint64_t bytes)
      : target_(fs::absolute(target).lexically_normal()),
        path_(target_.parent_path() /
              (std::string(".") + target_.filename().string() + ".writing")) {
    if (!target_.has_filename() || fs::is_directory(target_)) {
      throw std::runtime_error(target.string() + ": expected the name of a file, got a folder's");
    }
    // Left by one that was ended.
    ::unlink(path_.c_str());
    File(path_, File::Access::kCreate).allocate(bytes);
  }
  ~FileBeside() {
    if (!named_) ::unlink(path_.c_str());
  }
  FileBeside(const FileBeside&) = delete;
  FileBeside& operator=(const FileBeside&) = delete;

  const fs::path& path() const { return path_; }
  void give_name() {
    if (std::rename(path_.c_str(), target_.c_str()) != 0) {
      throw_call_failed(path_, "rename to " + target_.string(), errno);
    }
    named_ = true;
    sync_directory(target_.parent_path());
  }

 private:
  const fs::path target_;
  const fs::path path_;
  bool named_ = false;
};

// Under which names a file's tensors come, each from one.
class NewNames {
 public:
  NewNames(const std::string& file, const Renaming& renaming) : file_(file), renaming_(renaming) {}

  std::optional<NameMap::Renamed> of(const std::string& name) {
    auto renamed = renaming_.names.rename(name, renaming_.direction);
    if (!renamed && renaming_.unmapped == Unmapped::kRefuse) {
      refuse("an entry of the map for each name", "none for " + in_quotes(name));
    }
    if (!renamed && renaming_.unmapped == Unmapped::kKeep) renamed = {name, false};
    if (!renamed) return std::nullopt;
    const auto [before, is_new] = origins_.emplace(renamed->name, name);
    if (!is_new) {
      refuse("each tensor under a name of its own", in_quotes(renamed->name) + " for " +
                                                        in_quotes(before->second) + " and " +
                                                        in_quotes(name));
    }
    return renamed;
  }

  [[noreturn]] void refuse(const std::string& expected, const std::string& got) const {
    throw std::runtime_error(file_ + ": expected " + expected + ", got " + got);
  }

 private:
  const std::string file_;
  const Renaming& renaming_;
  std::map<std::string, std::string> origins_;
};

}  // namespace

uint64_t WeightsCopy::file_bytes() const {
  return prefix.size() + (tensors.empty() ? 0 : tensors.back().to.end);
}

std::map<std::string, std::string> tied_names(const SafetensorsHeader& header) {
  std::map<std::string, std::string> tied;
  std::map<std::string, const TensorEntry*> by_name;
  for (const TensorEntry& tensor : header.tensors) by_name.emplace(tensor.name, &tensor);
  for (const auto& [key, value] : header.metadata) {
    if (!by_name.contains(key) && by_name.contains(value)) tied.emplace(key, value);
  }
  return tied;
}

WeightsCopy plan_copy(const std::string& file, const SafetensorsHeader& header,
                      const Renaming& renaming) {
  NewNames names(file, renaming);
  WeightsCopy copy{.tensors = {}, .metadata = {{"format", "pt"}}, .prefix = {}, .left_out = {}};
  std::map<std::string, NameMap::Renamed> stored;
  std::vector<TensorEntry> written;
  for (const TensorEntry& from : header.tensors) {
    const auto renamed = names.of(from.name);
    if (!renamed) {
      copy.left_out.push_back(from.name);
      continue;
    }
    if (renamed->transpose && from.shape.size() != 2) {
      names.refuse("two dimensions of " + in_quotes(from.name) + ", which the map transposes",
                   words_of(from.shape));
    }
    stored.emplace(from.name, *renamed);
    TensorEntry to = from;
    to.name = renamed->name;
    if (renamed->transpose) std::reverse(to.shape.begin(), to.shape.end());
    written.push_back(std::move(to));
    copy.tensors.push_back({from, {}, renamed->transpose});
  }
  for (const auto& [name, stored_as] : tied_names(header)) {
    const auto renamed = names.of(name);
    const auto target = stored.find(stored_as);
    if (!renamed || target == stored.end()) {
      copy.left_out.push_back(name);
      continue;
    }
    if (renamed->transpose != target->second.transpose) {
      names.refuse("tied " + in_quotes(name) + " and " + in_quotes(stored_as) +
                       " both transposed, or neither",
                   "one of them");
    }
    copy.metadata.emplace(renamed->name, target->second.name);
  }
  place_in_order(written);
  for (size_t i = 0; i < written.size(); ++i) copy.tensors[i].to = written[i];
  try {
    copy.prefix = safetensors_prefix(written, copy.metadata);
  } catch (const std::invalid_argument& error) {
    throw std::runtime_error(file + ": " + error.what());
  }
  return copy;
}

PieceChecksums write_copy(const WeightsCopy& copy, const ReadData& read, const fs::path& file) {
  Appender appender(file);
  appender.append(copy.prefix);
  for (const CopiedTensor& tensor : copy.tensors) {
    if (tensor.transpose) {
      append_transposed(tensor, read, appender);
      continue;
    }
    appender.append(bytes_of(tensor.from), [&](char* to, uint64_t done, uint64_t bytes) {
      read(tensor.from.begin + done, tensor.from.begin + done + bytes, to);
    });
  }
  return appender.finish();
}

WeightsCopy export_weights(const fs::path& state, const fs::path& file, const NameMap& names,
                           Unmapped unmapped) {
  const SavedState saved(find_state(state));
  const TensorFile& weights = saved.weights();
  WeightsCopy copy =
      plan_copy(weights.name(), weights.header(), {names, NameMap::Direction::kToTheirs, unmapped});
  FileBeside written(file, copy.file_bytes());
  BlockReader reader(weights);
  write_copy(
      copy, [&](uint64_t begin, uint64_t end, char* to) { reader.read(begin, end, to); },
      written.path());
  written.give_name();
  return copy;
}

WeightsCopy import_weights(const fs::path& file, const fs::path& state, const Renaming& renaming,
                           int64_t step) {
  const File from(file, File::Access::kRead);
  const SafetensorsHeader header = read_safetensors_header(from);
  WeightsCopy copy = plan_copy(from.name(), header, renaming);
  if (fs::exists(state) && !fs::is_empty(state)) {
    throw std::runtime_error(state.string() +
                             ": expected no such folder, or an empty one, got one that has "
                             "something; give another name, or move it away");
  }
  NewState made(state);
  made.create_file(kWeightsFile, copy.file_bytes());
  const PieceChecksums written = write_copy(
      copy,
      [&](uint64_t begin, uint64_t end, char* to) {
        from.read(header.data_begin + begin, to, end - begin);
      },
      made.directory() / kWeightsFile);
  const FileEntry entry{.name = kWeightsFile,
                        .bytes = copy.file_bytes(),
                        .blocks = join_pieces(kWeightsFile, copy.file_bytes(), written.pieces())};
  made.commit({.step = step, .files = {entry}, .content = nlohmann::json::object()},
              /*update_latest=*/false);
  return copy;
}

}  // namespace zeropage::tools
