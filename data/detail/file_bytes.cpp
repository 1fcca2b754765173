#include "data/detail/file_bytes.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <zlib.h>

#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace zeropage::data::detail {

std::string read_file_bytes(const std::filesystem::path& file, int64_t most_bytes) {
  const std::string name = file.string();
  ZP_CHECK(std::filesystem::exists(file), name,
           ": there is no such file; scripts/get_data.sh fetches the data sets of the recipes");
  ZP_CHECK(std::filesystem::is_regular_file(file), name, ": expected a file, got a folder");
  // Reads what is not gzipped as it is.
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> in(gzopen(name.c_str(), "rb"), &gzclose);
  ZP_CHECK(in != nullptr, name, ": cannot be opened: ", std::strerror(errno));
  constexpr size_t kStep = size_t{1} << 20;
  std::string bytes;
  while (true) {
    const size_t before = bytes.size();
    bytes.resize(before + kStep);
    const int count = gzread(in.get(), bytes.data() + before, kStep);
    int code = Z_OK;
    const char* words = gzerror(in.get(), &code);
    ZP_CHECK(count >= 0 && (code == Z_OK || code == Z_STREAM_END), name, ": is damaged after ",
             before + static_cast<size_t>(std::max(count, 0)), " bytes (",
             code == Z_ERRNO ? std::strerror(errno) : words, "); fetch it again");
    bytes.resize(before + static_cast<size_t>(count));
    ZP_CHECK(static_cast<int64_t>(bytes.size()) <= most_bytes, name, ": has more than ",
             memory::format_bytes(most_bytes), "; expected a smaller file");
    if (static_cast<size_t>(count) < kStep) return bytes;
  }
}

}  // namespace zeropage::data::detail
