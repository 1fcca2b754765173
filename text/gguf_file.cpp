#include "zeropage/text/gguf_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "text/detail/gguf_blocks.h"
#include "text/mapped_file.h"
#include "zeropage/text/text_error.h"

namespace zeropage::text {
namespace {

constexpr uint32_t kMagic = 0x46554747;  // "GGUF"
constexpr uint32_t kMostDimensions = 4;
constexpr uint64_t kMostKeyBytes = 65535;  // the format's bound
constexpr int kMostArrayDepth = 4;
constexpr uint64_t kDefaultAlignment = 32;
constexpr uint64_t kMostAlignment = 1 << 20;
// The least that a pair of the metadata, or a tensor, takes: counts beyond that lie.
constexpr uint64_t kLeastPairBytes = 8 + 4 + 1;
constexpr uint64_t kLeastTensorBytes = 8 + 4 + 4 + 8;

// The types of the metadata's values, by the format's numbers.
enum ValueType : uint32_t {
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kFloat32,
  kBool,
  kString,
  kArray,
  kUint64,
  kInt64,
  kFloat64,
};
// Zero for a string and an array, whose bytes differ.
constexpr std::array<uint64_t, 13> kValueBytes = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

std::string in_quotes(std::string_view name) {
  constexpr size_t kShown = 64;
  std::string shown = "\"";
  for (const char character : name.substr(0, kShown)) {
    const bool plain = character >= ' ' && character <= '~';
    shown += plain ? character : '?';
  }
  return shown + (name.size() > kShown ? "...\"" : "\"");
}

// The header's bytes, one value after the other.
class Cursor {
 public:
  Cursor(const std::string& file, std::string_view bytes, uint64_t at = 0)
      : file_(file), bytes_(bytes), at_(at) {}

  uint64_t at() const { return at_; }
  uint64_t left() const { return bytes_.size() - at_; }

  [[noreturn]] void refuse(const std::string& expected, const std::string& got) const {
    throw TextError(file_, "byte " + std::to_string(at_) + ": expected " + expected + ", got " +
                               got + "; the file is damaged, or not GGUF");
  }

  std::string_view take(uint64_t count, const char* what) {
    if (count > left()) {
      refuse(std::to_string(count) + " bytes of " + what,
             std::to_string(left()) + " up to the end of the file");
    }
    const std::string_view taken = bytes_.substr(at_, count);
    at_ += count;
    return taken;
  }

  template <typename T>
  T value(const char* what) {
    T read;
    std::memcpy(&read, take(sizeof(T), what).data(), sizeof(T));
    return read;
  }

  std::string_view string(const char* what) { return take(value<uint64_t>(what), what); }

  uint64_t count(uint64_t least_bytes_each, const char* what) {
    const auto number = value<uint64_t>(what);
    if (number > left() / least_bytes_each) {
      refuse("as many " + std::string(what) + " as " + std::to_string(left()) + " bytes may hold",
             std::to_string(number));
    }
    return number;
  }

 private:
  const std::string& file_;
  const std::string_view bytes_;
  uint64_t at_;
};

GgufArray read_array(Cursor& in, int depth) {
  if (depth > kMostArrayDepth) {
    in.refuse("arrays in arrays to a depth of " + std::to_string(kMostArrayDepth), "more");
  }
  GgufArray array{.type = in.value<uint32_t>("an array's type")};
  if (array.type >= kValueBytes.size()) {
    in.refuse("an array's type from 0 to 12", std::to_string(array.type));
  }
  const uint64_t each = kValueBytes[array.type];
  // A string has 8 bytes or more, an array 12.
  array.count = in.count(each != 0 ? each : 8, "elements of an array");
  const Cursor begin = in;
  if (each != 0) {
    array.bytes = in.take(each * array.count, "an array");
    return array;
  }
  for (uint64_t i = 0; i < array.count; ++i) {
    if (array.type == kString) {
      in.string("a string");
    } else {
      read_array(in, depth + 1);
    }
  }
  Cursor again = begin;
  array.bytes = again.take(in.at() - begin.at(), "an array");
  return array;
}

GgufValue read_value(Cursor& in, uint32_t type) {
  constexpr const char* kWhat = "a value";
  switch (type) {
    case kUint8:
      return uint64_t{in.value<uint8_t>(kWhat)};
    case kInt8:
      return int64_t{in.value<int8_t>(kWhat)};
    case kUint16:
      return uint64_t{in.value<uint16_t>(kWhat)};
    case kInt16:
      return int64_t{in.value<int16_t>(kWhat)};
    case kUint32:
      return uint64_t{in.value<uint32_t>(kWhat)};
    case kInt32:
      return int64_t{in.value<int32_t>(kWhat)};
    case kFloat32:
      return double{in.value<float>(kWhat)};
    case kBool:
      return in.value<uint8_t>(kWhat) != 0;
    case kString:
      return in.string("a string");
    case kArray:
      return read_array(in, 1);
    case kUint64:
      return in.value<uint64_t>(kWhat);
    case kInt64:
      return in.value<int64_t>(kWhat);
    case kFloat64:
      return in.value<double>(kWhat);
    default:
      in.refuse("a value's type from 0 to 12", std::to_string(type));
  }
}

GgufTensor read_tensor(Cursor& in) {
  GgufTensor tensor;
  tensor.name = in.string("a tensor's name");
  const std::string who = "tensor " + in_quotes(tensor.name) + " with ";
  const auto dimensions = in.value<uint32_t>("a tensor's number of sizes");
  if (dimensions > kMostDimensions) {
    in.refuse(who + "4 sizes or fewer", std::to_string(dimensions));
  }
  tensor.numel = 1;
  for (uint32_t i = 0; i < dimensions; ++i) {
    const auto size = in.value<uint64_t>("a tensor's size");
    if (size == 0 || size > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) ||
        __builtin_mul_overflow(tensor.numel, static_cast<int64_t>(size), &tensor.numel)) {
      in.refuse(who + "sizes of 1 or more whose product is less than 2^63", std::to_string(size));
    }
    tensor.shape.insert(tensor.shape.begin(), static_cast<int64_t>(size));
  }
  tensor.type = static_cast<GgufType>(in.value<uint32_t>("a tensor's type"));
  const detail::GgufBlock* const block = detail::block_of(tensor.type);
  if (block == nullptr) in.refuse(who + "a type of the format", name_of(tensor.type));
  const int64_t last = tensor.shape.empty() ? 1 : tensor.shape.back();
  if (last % block->numel != 0) {
    in.refuse(who + "rows of whole blocks of " + std::to_string(block->numel) + " elements of " +
                  block->name,
              "rows of " + std::to_string(last));
  }
  if (__builtin_mul_overflow(static_cast<uint64_t>(tensor.numel) / block->numel,
                             uint64_t{block->bytes}, &tensor.bytes)) {
    in.refuse(who + "fewer than 2^64 bytes", "more");
  }
  tensor.begin = in.value<uint64_t>("a tensor's offset");  // from the beginning of the data
  return tensor;
}

}  // namespace

class GgufFile::Contents {
 public:
  explicit Contents(const std::filesystem::path& path) : file(path) {
    Cursor in(file.name(), file.bytes());
    read_beginning(in);
    // The second count stands in front of the first one's pairs.
    const uint64_t tensor_count = in.count(kLeastTensorBytes, "tensors");
    const uint64_t pair_count = in.count(kLeastPairBytes, "metadata");
    for (uint64_t i = 0; i < pair_count; ++i) read_pair(in);
    read_tensors(in, tensor_count);
  }

  const GgufValue& value(std::string_view key) const {
    const auto found = metadata.find(key);
    if (found == metadata.end()) {
      throw TextError(file.name(), "its metadata has no " + in_quotes(key));
    }
    return found->second;
  }

  [[noreturn]] void refuse(std::string_view key, const char* expected) const {
    constexpr std::array<const char*, 6> kWords = {"an integer",    "an integer", "a number",
                                                   "true or false", "a string",   "an array"};
    const GgufValue& found = value(key);
    const auto* const array = std::get_if<GgufArray>(&found);
    throw TextError(file.name(),
                    "metadata " + in_quotes(key) + ": expected " + expected + ", got " +
                        (array == nullptr ? kWords[found.index()]
                                          : "an array of " + std::to_string(array->count) +
                                                " values of type " + std::to_string(array->type)));
  }

  // The values of an array, as `Number`.
  template <typename Number>
  std::vector<Number> array(std::string_view key, bool with_fractions, const char* expected) const {
    const auto* const found = std::get_if<GgufArray>(&value(key));
    if (found == nullptr || found->type == kString || found->type == kArray ||
        found->type == kBool ||
        (!with_fractions && (found->type == kFloat32 || found->type == kFloat64))) {
      refuse(key, expected);
    }
    Cursor in(file.name(), found->bytes);
    std::vector<Number> values;
    values.reserve(found->count);
    for (uint64_t i = 0; i < found->count; ++i) {
      const GgufValue one = read_value(in, found->type);
      if (const auto* const positive = std::get_if<uint64_t>(&one)) {
        values.push_back(static_cast<Number>(*positive));
      } else if (const auto* const integer = std::get_if<int64_t>(&one)) {
        values.push_back(static_cast<Number>(*integer));
      } else {
        values.push_back(static_cast<Number>(std::get<double>(one)));
      }
    }
    return values;
  }

  const MappedFile file;
  uint32_t version = 0;
  std::map<std::string, GgufValue, std::less<>> metadata;
  std::vector<GgufTensor> tensors;
  std::map<std::string_view, size_t> places;  // of tensors, by name

 private:
  void read_beginning(Cursor& in) {
    const auto magic = in.value<uint32_t>("the format's name");
    if (magic != kMagic) {
      throw TextError(file.name(), "expected a GGUF file, which begins with \"GGUF\", got " +
                                       in_quotes(file.bytes().substr(0, 4)));
    }
    version = in.value<uint32_t>("the format's version");
    if (version == 2 || version == 3) return;
    const bool other_order = __builtin_bswap32(version) == 2 || __builtin_bswap32(version) == 3;
    throw TextError(file.name(), "expected version 2 or 3 of GGUF, got " +
                                     (other_order ? "a big-endian file, which is not read here"
                                                  : std::to_string(version)));
  }

  void read_pair(Cursor& in) {
    const std::string_view key = in.string("a key");
    if (key.empty() || key.size() > kMostKeyBytes) {
      in.refuse("a key of 1 to 65535 bytes", std::to_string(key.size()));
    }
    const auto type = in.value<uint32_t>("a value's type");
    if (!metadata.emplace(key, read_value(in, type)).second) {
      in.refuse("each key once", in_quotes(key) + " twice");
    }
  }

  uint64_t alignment() const {
    const auto found = metadata.find("general.alignment");
    if (found == metadata.end()) return kDefaultAlignment;
    const auto* const bytes = std::get_if<uint64_t>(&found->second);
    if (bytes == nullptr || !std::has_single_bit(*bytes) || *bytes > kMostAlignment) {
      throw TextError(file.name(),
                      "metadata \"general.alignment\": expected a power of two up to " +
                          std::to_string(kMostAlignment) + ", got " +
                          (bytes == nullptr ? "something else" : std::to_string(*bytes)));
    }
    return *bytes;
  }

  void read_tensors(Cursor& in, uint64_t count) {
    const uint64_t aligned_to = alignment();
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t began = in.at();
      tensors.push_back(read_tensor(in));
      if (tensors.back().begin % aligned_to != 0) {
        throw TextError(file.name(), "byte " + std::to_string(began) + ": tensor " +
                                         in_quotes(tensors.back().name) +
                                         ": expected an offset that is a multiple of " +
                                         std::to_string(aligned_to) + ", got " +
                                         std::to_string(tensors.back().begin));
      }
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!places.emplace(tensors[i].name, i).second) {
        throw TextError(file.name(), "expected each tensor once, got " +
                                         in_quotes(tensors[i].name) +
                                         " twice; the file is damaged");
      }
    }
    // The data begins at a multiple of the alignment.
    place(in.at() + (aligned_to - in.at() % aligned_to) % aligned_to);
  }

  // Makes the offsets those of the file, and checks that tensors lie within it and apart.
  void place(uint64_t data_begin) {
    std::vector<const GgufTensor*> by_place;
    for (GgufTensor& tensor : tensors) {
      const uint64_t size = file.bytes().size();
      if (data_begin > size || tensor.begin > size - data_begin ||
          tensor.bytes > size - data_begin - tensor.begin) {
        throw TextError(file.name(),
                        "tensor " + in_quotes(tensor.name) + ": expected its " +
                            std::to_string(tensor.bytes) + " bytes at byte " +
                            std::to_string(tensor.begin) + " of the data, which begins at byte " +
                            std::to_string(data_begin) + ", got a file of " + std::to_string(size) +
                            " bytes; it was cut off, or is damaged");
      }
      tensor.begin += data_begin;
      by_place.push_back(&tensor);
    }
    std::sort(by_place.begin(), by_place.end(),
              [](const GgufTensor* a, const GgufTensor* b) { return a->begin < b->begin; });
    for (size_t i = 1; i < by_place.size(); ++i) {
      const GgufTensor& before = *by_place[i - 1];
      if (before.begin + before.bytes > by_place[i]->begin) {
        throw TextError(file.name(), "expected tensors apart, got " + in_quotes(before.name) +
                                         " and " + in_quotes(by_place[i]->name) +
                                         " with bytes in common; the file is damaged");
      }
    }
  }
};

std::string name_of(GgufType type) {
  const detail::GgufBlock* const block = detail::block_of(type);
  return block != nullptr ? block->name : "type " + std::to_string(static_cast<uint32_t>(type));
}

bool can_read(GgufType type) {
  const detail::GgufBlock* const block = detail::block_of(type);
  return block != nullptr && block->unpack != nullptr;
}

GgufFile::GgufFile(const std::filesystem::path& path)
    : contents_(std::make_unique<const Contents>(path)) {}
GgufFile::~GgufFile() = default;

const std::string& GgufFile::name() const {
  return contents_->file.name();
}
uint32_t GgufFile::version() const {
  return contents_->version;
}
const std::map<std::string, GgufValue, std::less<>>& GgufFile::metadata() const {
  return contents_->metadata;
}
bool GgufFile::has(std::string_view key) const {
  return contents_->metadata.contains(key);
}

int64_t GgufFile::integer(std::string_view key) const {
  const GgufValue& value = contents_->value(key);
  if (const auto* const number = std::get_if<int64_t>(&value)) return *number;
  const auto* const positive = std::get_if<uint64_t>(&value);
  if (positive == nullptr || static_cast<int64_t>(*positive) < 0) {
    contents_->refuse(key, "an integer less than 2^63");
  }
  return static_cast<int64_t>(*positive);
}

double GgufFile::number(std::string_view key) const {
  const GgufValue& value = contents_->value(key);
  if (const auto* const number = std::get_if<double>(&value)) return *number;
  if (const auto* const integer = std::get_if<int64_t>(&value)) {
    return static_cast<double>(*integer);
  }
  const auto* const positive = std::get_if<uint64_t>(&value);
  if (positive == nullptr) contents_->refuse(key, "a number");
  return static_cast<double>(*positive);
}

bool GgufFile::flag(std::string_view key) const {
  const auto* const value = std::get_if<bool>(&contents_->value(key));
  if (value == nullptr) contents_->refuse(key, "true or false");
  return *value;
}

std::string_view GgufFile::string(std::string_view key) const {
  const auto* const value = std::get_if<std::string_view>(&contents_->value(key));
  if (value == nullptr) contents_->refuse(key, "a string");
  return *value;
}

std::vector<int64_t> GgufFile::integers(std::string_view key) const {
  return contents_->array<int64_t>(key, /*with_fractions=*/false, "an array of integers");
}

std::vector<double> GgufFile::numbers(std::string_view key) const {
  return contents_->array<double>(key, /*with_fractions=*/true, "an array of numbers");
}

std::vector<std::string_view> GgufFile::strings(std::string_view key) const {
  const auto* const found = std::get_if<GgufArray>(&contents_->value(key));
  if (found == nullptr || found->type != kString) contents_->refuse(key, "an array of strings");
  Cursor in(name(), found->bytes);
  std::vector<std::string_view> values;
  values.reserve(found->count);
  for (uint64_t i = 0; i < found->count; ++i) values.push_back(in.string("a string"));
  return values;
}

const std::vector<GgufTensor>& GgufFile::tensors() const {
  return contents_->tensors;
}

bool GgufFile::has_tensor(std::string_view name) const {
  return contents_->places.contains(name);
}

const GgufTensor& GgufFile::tensor(std::string_view name) const {
  const auto found = contents_->places.find(name);
  if (found == contents_->places.end()) {
    throw TextError(this->name(), "has no tensor " + in_quotes(name) + " among its " +
                                      std::to_string(tensors().size()));
  }
  return tensors()[found->second];
}

void GgufFile::read(const GgufTensor& tensor, int64_t first, int64_t count, float* out) const {
  if (first < 0 || count < 0 || first > tensor.numel || count > tensor.numel - first) {
    throw TextError(name(), "tensor " + in_quotes(tensor.name) + ": expected elements from 0 to " +
                                std::to_string(tensor.numel) + ", got " + std::to_string(count) +
                                " from " + std::to_string(first) + " on");
  }
  if (!can_read(tensor.type)) {
    throw TextError(name(), "tensor " + in_quotes(tensor.name) +
                                ": expected F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, "
                                "Q5_K or Q6_K, got " +
                                name_of(tensor.type) + "; take another quantisation of the model");
  }
  const detail::GgufBlock& block = *detail::block_of(tensor.type);
  const char* const data = contents_->file.bytes().data() + tensor.begin;
  const int64_t numel = block.numel;
  std::array<float, detail::kMostBlockNumel> cut;
  while (count > 0) {
    const int64_t in_block = first % numel;
    const char* const from = data + static_cast<uint64_t>(first / numel) * block.bytes;
    int64_t done = count / numel * numel;
    if (in_block == 0 && done > 0) {
      block.unpack(from, static_cast<size_t>(done / numel), out);
    } else {
      block.unpack(from, 1, cut.data());
      done = std::min(numel - in_block, count);
      std::copy_n(cut.data() + in_block, done, out);
    }
    first += done;
    count -= done;
    out += done;
  }
}

}  // namespace zeropage::text
