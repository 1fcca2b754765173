#include "accumulate/detail/archive_values.h"

#include <ATen/core/ivalue.h>

#include "zeropage/check.h"

namespace zeropage::accumulate::detail {
namespace {

c10::IValue read(torch::serialize::InputArchive& archive, const std::string& owner,
                 const std::string& key) {
  c10::IValue value;
  ZP_CHECK(archive.try_read(key, value), owner, ": the archive has no \"", key,
           "\"; expected one that was saved from a ", owner);
  return value;
}

}  // namespace

double read_double(torch::serialize::InputArchive& archive, const std::string& owner,
                   const std::string& key) {
  const c10::IValue value = read(archive, owner, key);
  ZP_CHECK(value.isDouble(), owner, ": \"", key, "\" in the archive: expected a float, got ",
           value.tagKind());
  return value.toDouble();
}

int64_t read_count(torch::serialize::InputArchive& archive, const std::string& owner,
                   const std::string& key) {
  const c10::IValue value = read(archive, owner, key);
  ZP_CHECK(value.isInt() && value.toInt() >= 0, owner, ": \"", key,
           "\" in the archive: expected an integer of 0 or more, got ", value);
  return value.toInt();
}

std::vector<double> read_doubles(torch::serialize::InputArchive& archive, const std::string& owner,
                                 const std::string& key) {
  const c10::IValue value = read(archive, owner, key);
  ZP_CHECK(value.isDoubleList(), owner, ": \"", key,
           "\" in the archive: expected a list of floats, got ", value.tagKind());
  return value.toDoubleVector();
}

}  // namespace zeropage::accumulate::detail
