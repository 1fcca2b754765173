#include "zeropage/data/csv_file.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/ops/empty.h>

#include "data/detail/file_bytes.h"
#include "zeropage/check.h"

namespace zeropage::data {
namespace {

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\r";
  const size_t first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

// Appends the numbers of a line.
void read_line(std::string_view line, const std::string& place, std::vector<float>& numbers) {
  for (size_t column = 1;; ++column) {
    const size_t comma = line.find(',');
    const std::string_view field = trimmed(line.substr(0, comma));
    float number = 0;
    const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), number);
    ZP_CHECK(error == std::errc() && end == field.data() + field.size(), place, ", column ", column,
             ": expected a number, got \"", field, "\"");
    numbers.push_back(number);
    if (comma == std::string_view::npos) return;
    line.remove_prefix(comma + 1);
  }
}

}  // namespace

at::Tensor read_csv(const std::filesystem::path& file) {
  const std::string text = detail::read_file_bytes(file);
  std::vector<float> numbers;
  size_t columns = 0;
  size_t line_number = 0;
  for (std::string_view left = text; !left.empty();) {
    const size_t end = std::min(left.find('\n'), left.size());
    const std::string_view line = left.substr(0, end);
    left.remove_prefix(std::min(end + 1, left.size()));
    ++line_number;
    if (trimmed(line).empty()) continue;
    const std::string place = c10::str(file.string(), ", line ", line_number);
    const size_t before = numbers.size();
    read_line(line, place, numbers);
    const size_t count = numbers.size() - before;
    if (columns == 0) columns = count;
    ZP_CHECK(count == columns, place, ": expected ", columns, " numbers as in the first line, got ",
             count);
  }
  ZP_CHECK(columns > 0, file.string(), ": expected lines of numbers, got none");
  const auto rows = static_cast<int64_t>(numbers.size() / columns);
  at::Tensor table = at::empty({rows, static_cast<int64_t>(columns)}, at::kFloat);
  std::copy(numbers.begin(), numbers.end(), table.mutable_data_ptr<float>());
  return table;
}

}  // namespace zeropage::data
