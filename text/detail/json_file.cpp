#include "text/detail/json_file.h"

#include "text/mapped_file.h"
#include "zeropage/text/text_error.h"

namespace zeropage::text::detail {

nlohmann::json read_json(const std::filesystem::path& file) {
  const MappedFile mapped(file);
  try {
    return nlohmann::json::parse(mapped.bytes());
  } catch (const nlohmann::json::parse_error& error) {
    throw TextError(mapped.name(), "expected JSON, got something else at byte " +
                                       std::to_string(error.byte) + " of " +
                                       std::to_string(mapped.bytes().size()) +
                                       "; the file is damaged, cut off, or another one");
  } catch (const nlohmann::json::out_of_range&) {
    throw TextError(mapped.name(),
                    "expected JSON whose numbers a double holds, got a larger one; the file is "
                    "damaged or another one");
  }
}

}  // namespace zeropage::text::detail
