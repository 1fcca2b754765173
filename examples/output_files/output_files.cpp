#include "output_files/output_files.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include <zeropage/check.h>
#include <zeropage/world.h>

namespace examples {
namespace {

// errno of the last failure.
std::string cause() {
  return errno != 0 ? std::strerror(errno) : "unknown error";
}

void check_can_be_written(const OutputFile& file) {
  std::error_code none;
  const bool was_there = std::filesystem::exists(file.path, none);
  errno = 0;
  const std::ofstream out(file.path, std::ios::app);
  ZP_CHECK(out.is_open(), file.flag, " ", file.path, ": cannot be written: ", cause(),
           "; choose a file in a folder that is there and writable");
  if (!was_there) std::filesystem::remove(file.path, none);
}

}  // namespace

void check_outputs(const std::vector<OutputFile>& files) {
  namespace comm = zeropage::comm;
  if (comm::launched_by_environment() && comm::read_place().rank != 0) return;
  std::map<std::filesystem::path, std::string> flag_of;
  for (const OutputFile& file : files) {
    if (file.path.empty()) continue;
    check_can_be_written(file);
    const auto [known, is_new] =
        flag_of.emplace(std::filesystem::weakly_canonical(file.path), file.flag);
    ZP_CHECK(is_new, file.flag, " ", file.path, ": ", known->second,
             " writes to the same file; give each a file of its own");
  }
}

void write_output(const OutputFile& file, const std::string& text) {
  errno = 0;
  std::ofstream out(file.path, std::ios::binary | std::ios::trunc);
  out << text;
  out.close();
  ZP_CHECK(out.good(), file.flag, " ", file.path, ": cannot be written: ", cause());
}

}  // namespace examples
