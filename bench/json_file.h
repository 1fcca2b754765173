// The file that --json of a benchmark names.
#pragma once

#include <fstream>
#include <iostream>
#include <string>

#include <nlohmann/json.hpp>

#include "zeropage/check.h"

namespace bench {

// Nothing for "", and stdout for "-". Throws where it cannot be written.
inline void write_json(const std::string& path, const nlohmann::json& json) {
  if (path.empty()) return;
  if (path == "-") {
    std::cout << json.dump(2) << std::endl;
    return;
  }
  std::ofstream file(path);
  file << json.dump(2) << "\n";
  ZP_CHECK(file.flush(), "--json ", path,
           ": could not be written; name a file in a folder that is there");
}

}  // namespace bench
