#include "zeropage/data/idx_file.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include <ATen/ops/empty.h>

#include "data/detail/file_bytes.h"
#include "zeropage/check.h"

namespace zeropage::data {
namespace {

constexpr size_t kMostDimensions = 8;

at::ScalarType idx_dtype(const std::string& name, unsigned char code) {
  switch (code) {
    case 0x08:
      return at::kByte;
    case 0x09:
      return at::kChar;
    case 0x0B:
      return at::kShort;
    case 0x0C:
      return at::kInt;
    case 0x0D:
      return at::kFloat;
    case 0x0E:
      return at::kDouble;
    default:
      ZP_THROW(name, ": expected an IDX type (8, 9, 11, 12, 13 or 14) in byte 2, got ",
               static_cast<int>(code), "; is it an IDX file?");
  }
}

uint32_t big_endian(const char* bytes) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

}  // namespace

at::Tensor read_idx(const std::filesystem::path& file) {
  const std::string name = file.string();
  const std::string bytes = detail::read_file_bytes(file);
  ZP_CHECK(bytes.size() >= 4 && bytes[0] == 0 && bytes[1] == 0, name,
           ": expected an IDX file, which begins with two zero bytes, a type and a number of "
           "dimensions, got ",
           bytes.size(), " bytes of something else");
  const at::ScalarType dtype = idx_dtype(name, static_cast<unsigned char>(bytes[2]));
  const auto dimensions = static_cast<size_t>(static_cast<unsigned char>(bytes[3]));
  ZP_CHECK(dimensions >= 1 && dimensions <= kMostDimensions, name, ": expected 1 to ",
           kMostDimensions, " dimensions, got ", dimensions);
  const size_t header = 4 + 4 * dimensions;
  ZP_CHECK(bytes.size() >= header, name, ": expected a header of ", header, " bytes, got ",
           bytes.size(), "; the file is cut off");
  std::vector<int64_t> sizes;
  const size_t element = at::elementSize(dtype);
  const size_t available = bytes.size() - header;
  // Saturates, so that sizes which multiply past 2^64 are not taken for few bytes.
  size_t expected = element;
  for (size_t i = 0; i < dimensions; ++i) {
    const size_t size = big_endian(bytes.data() + 4 + 4 * i);
    sizes.push_back(static_cast<int64_t>(size));
    if (__builtin_mul_overflow(expected, size, &expected)) expected = SIZE_MAX;
  }
  ZP_CHECK(expected == available, name, ": expected ", expected, " bytes of values for sizes ",
           at::IntArrayRef(sizes), " of ", dtype, ", got ", available,
           "; the file is cut off or has something behind it");
  at::Tensor values = at::empty(sizes, dtype);
  auto* to = static_cast<char*>(values.mutable_data_ptr());
  std::memcpy(to, bytes.data() + header, expected);
  if (element > 1) {
    for (size_t i = 0; i < expected; i += element) std::reverse(to + i, to + i + element);
  }
  return values;
}

}  // namespace zeropage::data
