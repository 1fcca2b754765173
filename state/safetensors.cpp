#include <algorithm>
#include <array>
#include <deque>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <unordered_set>
#include <utility>

#include <nlohmann/json.hpp>

#include "state/detail/hash.h"
#include "state/detail/header_text.h"
#include "zeropage/saved_state.h"

namespace zeropage::state {
namespace {

using detail::HeaderIterator;
using detail::HeaderText;
using nlohmann::json;

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMostHeaderBytes = 100'000'000;  // as the format's own library has it
constexpr size_t kMostDimensions = 64;
constexpr uint64_t kDataAlignment = 4096;
constexpr const char* kMetadataName = "__metadata__";

struct OfDtype {
  Dtype dtype;
  const char* name;
  uint64_t bytes;
};
constexpr std::array<OfDtype, 13> kDtypes = {{{Dtype::kBool, "BOOL", 1},
                                              {Dtype::kU8, "U8", 1},
                                              {Dtype::kI8, "I8", 1},
                                              {Dtype::kI16, "I16", 2},
                                              {Dtype::kU16, "U16", 2},
                                              {Dtype::kF16, "F16", 2},
                                              {Dtype::kBF16, "BF16", 2},
                                              {Dtype::kI32, "I32", 4},
                                              {Dtype::kU32, "U32", 4},
                                              {Dtype::kF32, "F32", 4},
                                              {Dtype::kI64, "I64", 8},
                                              {Dtype::kU64, "U64", 8},
                                              {Dtype::kF64, "F64", 8}}};

const OfDtype& row_of(Dtype dtype) {
  return kDtypes[static_cast<size_t>(dtype)];
}

// Null if there is none.
const OfDtype* row_named(const std::string& name) {
  const auto* const row = std::find_if(kDtypes.begin(), kDtypes.end(),
                                       [&](const OfDtype& of) { return name == of.name; });
  return row == kDtypes.end() ? nullptr : row;
}

std::string in_quotes(const std::string& text) {
  return "\"" + text + "\"";
}

// Puts tensors together from what the JSON library finds, and hands them on one by one.
template <typename OnTensor, typename OnMetadata>
class HeaderReader final : public nlohmann::json_sax<json> {
 public:
  HeaderReader(HeaderText& text, uint64_t data_bytes, OnTensor on_tensor, OnMetadata on_metadata)
      : text_(text), data_bytes_(data_bytes), on_tensor_(on_tensor), on_metadata_(on_metadata) {}

  bool null() override { return refuse("null"); }
  bool boolean(bool /*value*/) override { return refuse("a boolean"); }
  bool number_integer(number_integer_t /*value*/) override { return refuse("a negative number"); }
  bool number_float(number_float_t /*value*/, const string_t& text) override {
    return refuse(text);
  }
  bool binary(binary_t& /*value*/) override { return refuse("binary"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (where_ != Where::kArray) refuse(std::to_string(value));
    std::vector<uint64_t>& numbers = field_ == "shape" ? tensor_.shape : offsets_;
    if (numbers.size() == (field_ == "shape" ? kMostDimensions : 2)) {
      text_.refuse(field_ == "shape" ? "64 dimensions or fewer" : "two data_offsets", "more");
    }
    numbers.push_back(value);
    return true;
  }

  bool string(string_t& value) override {
    if (where_ == Where::kMetadata) {
      on_metadata_(text_, std::move(key_), std::move(value));
    } else if (where_ == Where::kTensor && field_ == "dtype") {
      const OfDtype* const row = row_named(value);
      if (row == nullptr) text_.refuse("a dtype such as F32 or BF16", in_quotes(value));
      tensor_.dtype = row->dtype;
    } else {
      refuse(in_quotes(value));
    }
    return true;
  }

  bool start_object(std::size_t /*elements*/) override {
    if (where_ == Where::kBefore) {
      where_ = Where::kTop;
    } else if (where_ == Where::kTop && key_ == kMetadataName) {
      if (std::exchange(has_metadata_, true)) text_.refuse("one __metadata__", "a second");
      where_ = Where::kMetadata;
    } else if (where_ == Where::kTop) {
      tensor_ = {};
      tensor_.name = std::move(key_);
      offsets_.clear();
      fields_ = 0;
      where_ = Where::kTensor;
    } else {
      refuse("an object");
    }
    return true;
  }

  bool key(string_t& value) override {
    if (where_ != Where::kTensor) {
      key_ = std::move(value);
      return true;
    }
    static constexpr std::array<const char*, 3> kFields = {"dtype", "shape", "data_offsets"};
    const auto found = std::find(kFields.begin(), kFields.end(), value);
    if (found == kFields.end()) {
      text_.refuse("dtype, shape and data_offsets of " + in_quotes(tensor_.name), in_quotes(value));
    }
    const unsigned bit = 1U << (found - kFields.begin());
    if ((fields_ & bit) != 0) {
      text_.refuse("one " + value + " of " + in_quotes(tensor_.name), "a second");
    }
    fields_ |= bit;
    field_ = std::move(value);
    return true;
  }

  bool start_array(std::size_t /*elements*/) override {
    if (where_ != Where::kTensor || field_ == "dtype") refuse("an array");
    where_ = Where::kArray;
    return true;
  }
  bool end_array() override {
    where_ = Where::kTensor;
    return true;
  }

  bool end_object() override {
    if (where_ == Where::kTensor) {
      finish_tensor();
      where_ = Where::kTop;
    } else {
      where_ = where_ == Where::kMetadata ? Where::kTop : Where::kAfter;
    }
    return true;
  }

  bool parse_error(std::size_t /*position*/, const std::string& /*token*/,
                   const nlohmann::detail::exception& error) override {
    text_.refuse("JSON", error.what());
  }

 private:
  enum class Where : uint8_t { kBefore, kTop, kTensor, kArray, kMetadata, kAfter };

  [[noreturn]] bool refuse(const std::string& got) const {
    switch (where_) {
      case Where::kBefore:
      case Where::kAfter:
        text_.refuse("an object", got);
      case Where::kTop:
        text_.refuse("an object for " + in_quotes(key_), got);
      case Where::kMetadata:
        text_.refuse("a string for " + in_quotes(key_), got);
      case Where::kTensor:
        text_.refuse(field_ == "dtype" ? "a string for dtype" : "an array for " + field_, got);
      case Where::kArray:
        break;
    }
    text_.refuse("integers from 0 on in " + field_, got);
  }

  void finish_tensor() {
    const std::string name = in_quotes(tensor_.name);
    if (fields_ != 7) text_.refuse("dtype, shape and data_offsets of " + name, "not all of them");
    if (offsets_.size() != 2) text_.refuse("two data_offsets of " + name, "fewer");
    tensor_.begin = offsets_[0];
    tensor_.end = offsets_[1];
    if (tensor_.begin > tensor_.end || tensor_.end > data_bytes_) {
      text_.refuse("data_offsets of " + name + " within " + std::to_string(data_bytes_) + " bytes",
                   std::to_string(tensor_.begin) + " to " + std::to_string(tensor_.end));
    }
    uint64_t bytes = 0;
    try {
      bytes = bytes_of(tensor_);
    } catch (const std::overflow_error&) {
      text_.refuse("a shape of " + name + " below 2^64 bytes", "more");
    }
    if (bytes != tensor_.end - tensor_.begin) {
      text_.refuse(std::to_string(bytes) + " bytes for " + name + " by its dtype and shape",
                   std::to_string(tensor_.end - tensor_.begin));
    }
    on_tensor_(text_, std::move(tensor_));
  }

  HeaderText& text_;
  const uint64_t data_bytes_;
  OnTensor on_tensor_;
  OnMetadata on_metadata_;

  Where where_ = Where::kBefore;
  bool has_metadata_ = false;
  std::string key_;    // at the top, or in the metadata
  std::string field_;  // of the tensor
  TensorEntry tensor_;
  std::vector<uint64_t> offsets_;
  unsigned fields_ = 0;  // that the tensor has, a bit each
};

template <typename OnTensor, typename OnMetadata>
void read_header(const ByteSource& file, uint64_t data_begin, OnTensor on_tensor,
                 OnMetadata on_metadata) {
  HeaderText text(file, kLengthBytes, data_begin);
  if (text.current() != '{') {
    throw StateError(file.name(), kLengthBytes, "a header that begins with {", "something else",
                     "the file is not of safetensors");
  }
  HeaderReader reader(text, file.size() - data_begin, on_tensor, on_metadata);
  json::sax_parse(HeaderIterator(text), HeaderIterator(), &reader);
}

uint64_t data_begin_of(const ByteSource& file) {
  if (file.size() < kLengthBytes + 2) {
    throw StateError(file.name(), file.size(), "the length of a header, and a header",
                     "the end of the file", "it was cut, or is not of safetensors");
  }
  std::array<char, kLengthBytes> bytes{};
  file.read(0, bytes.data(), bytes.size());
  uint64_t length = 0;
  for (size_t i = bytes.size(); i-- > 0;) length = length << 8 | static_cast<uint8_t>(bytes[i]);
  const uint64_t most = std::min(kMostHeaderBytes, file.size() - kLengthBytes);
  if (length < 2 || length > most) {
    throw StateError(file.name(), 0, "a header of 2 to " + std::to_string(most) + " bytes",
                     std::to_string(length), "the file was cut, or is not of safetensors");
  }
  return kLengthBytes + length;
}

// A tensor's place: little enough to keep for all tensors before any is believed.
struct Place {
  uint64_t begin;
  uint64_t end;
  uint64_t name_hash;
};

void check_places(const ByteSource& file, uint64_t data_begin, std::deque<Place>& places) {
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t end = 0;
  for (const Place& place : places) {
    if (place.begin != end) {
      throw StateError(file.name(), data_begin + end, "a tensor's bytes to begin",
                       place.begin > end ? "none: the next begins at byte " +
                                               std::to_string(data_begin + place.begin)
                                         : "two tensors' bytes",
                       "the header is not of safetensors");
    }
    end = place.end;
  }
  if (data_begin + end != file.size()) {
    throw StateError(file.name(), data_begin + end, "the end of the file, behind the last tensor",
                     std::to_string(file.size() - data_begin - end) + " more bytes",
                     "the file is not whole, or not of safetensors");
  }
}

void check_unique(const ByteSource& file, std::deque<uint64_t>& hashes, const std::string& what) {
  std::sort(hashes.begin(), hashes.end());
  if (std::adjacent_find(hashes.begin(), hashes.end()) == hashes.end()) return;
  throw StateError(file.name(), kLengthBytes, "each " + what + " once", "one twice",
                   "the header is not of safetensors");
}

// Throws where anything is wrong. Keeps 24 bytes a tensor, which has 48 and more in the file.
void check_header(const ByteSource& file, uint64_t data_begin) {
  std::deque<Place> places;
  std::deque<uint64_t> keys;
  read_header(
      file, data_begin,
      [&](const HeaderText&, TensorEntry&& tensor) {
        places.push_back({tensor.begin, tensor.end, detail::hash_of(tensor.name)});
      },
      [&](const HeaderText&, std::string&& key, std::string&& /*value*/) {
        keys.push_back(detail::hash_of(key));
      });
  check_places(file, data_begin, places);
  check_unique(file, keys, "key of the metadata");
  std::deque<uint64_t> names;
  while (!places.empty()) {
    names.push_back(places.back().name_hash);
    places.pop_back();
  }
  check_unique(file, names, "name");
}

std::string json_string(const std::string& text) {
  try {
    return json(text).dump();
  } catch (const json::type_error&) {
    throw std::invalid_argument("safetensors: a name or metadata that is no UTF-8");
  }
}

std::string json_list(const std::vector<uint64_t>& numbers) {
  std::string text = "[";
  for (const uint64_t number : numbers) {
    if (text.size() > 1) text += ",";
    text += std::to_string(number);
  }
  return text + "]";
}

}  // namespace

uint64_t size_of(Dtype dtype) {
  return row_of(dtype).bytes;
}

const char* name_of(Dtype dtype) {
  return row_of(dtype).name;
}

Dtype dtype_of(const std::string& name) {
  const OfDtype* const row = row_named(name);
  if (row == nullptr) throw std::invalid_argument("safetensors has no dtype \"" + name + "\"");
  return row->dtype;
}

uint64_t bytes_of(const TensorEntry& tensor) {
  uint64_t bytes = size_of(tensor.dtype);
  // A 0 behind what overflows is none the less 0.
  if (std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end()) return 0;
  for (const uint64_t extent : tensor.shape) {
    if (extent > std::numeric_limits<uint64_t>::max() / bytes) {
      throw std::overflow_error("safetensors: a tensor of 2^64 bytes or more");
    }
    bytes *= extent;
  }
  return bytes;
}

uint64_t place_in_order(std::vector<TensorEntry>& tensors) {
  uint64_t end = 0;
  for (TensorEntry& tensor : tensors) {
    tensor.begin = end;
    const uint64_t bytes = bytes_of(tensor);
    if (bytes > std::numeric_limits<uint64_t>::max() - end) {
      throw std::overflow_error("safetensors: tensors of 2^64 bytes or more");
    }
    end += bytes;
    tensor.end = end;
  }
  return end;
}

SafetensorsHeader read_safetensors_header(const ByteSource& file) {
  SafetensorsHeader header;
  header.data_begin = data_begin_of(file);
  check_header(file, header.data_begin);
  read_header(
      file, header.data_begin,
      [&](const HeaderText&, TensorEntry&& tensor) { header.tensors.push_back(std::move(tensor)); },
      [&](const HeaderText&, std::string&& key, std::string&& value) {
        header.metadata.emplace(std::move(key), std::move(value));
      });
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const TensorEntry& a, const TensorEntry& b) {
              return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
            });
  return header;
}

std::string safetensors_prefix(const std::vector<TensorEntry>& tensors,
                               const std::map<std::string, std::string>& metadata) {
  std::vector<TensorEntry> placed = tensors;
  place_in_order(placed);
  std::string text = "{";
  const auto add = [&text](const std::string& name, const std::string& value) {
    if (text.size() > 1) text += ",";
    text += json_string(name) + ":" + value;
  };
  if (!metadata.empty()) {
    std::string pairs;
    for (const auto& [key, value] : metadata) {
      pairs += pairs.empty() ? "" : ",";
      pairs += json_string(key) + ":" + json_string(value);
    }
    add(kMetadataName, "{" + pairs + "}");
  }
  std::unordered_set<std::string_view> names;
  for (const TensorEntry& tensor : placed) {
    if (tensor.name.empty() || tensor.name == kMetadataName || !names.insert(tensor.name).second) {
      throw std::invalid_argument(
          "safetensors: expected each tensor under a name of its own, got " +
          in_quotes(tensor.name) +
          (tensor.name.empty() || tensor.name == kMetadataName ? "" : " twice"));
    }
    add(tensor.name, std::string("{\"dtype\":\"") + name_of(tensor.dtype) +
                         "\",\"shape\":" + json_list(tensor.shape) +
                         ",\"data_offsets\":" + json_list({tensor.begin, tensor.end}) + "}");
  }
  text += "}";
  const uint64_t end = kLengthBytes + text.size();
  text.append((kDataAlignment - end % kDataAlignment) % kDataAlignment, ' ');
  std::string prefix;
  for (uint64_t i = 0; i < kLengthBytes; ++i) {
    prefix += static_cast<char>(static_cast<uint64_t>(text.size()) >> 8 * i & 0xff);
  }
  return prefix + text;
}

}  // namespace zeropage::state
