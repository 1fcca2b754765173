#include "profile/report/written.h"

#include "profile/report/profile_file.h"

namespace zeropage::profile {

std::string check_name(const std::filesystem::path& path) {
  const std::string name = path.filename().string();
  if (name.ends_with(".json")) return {};
  return "\"" + path.string() + "\": expected a name that ends in .json, for the profile itself";
}

void write_profile(const Profile& profile, const std::filesystem::path& path) {
  if (const std::string error = check_name(path); !error.empty()) throw ProfileError(error);
  write_text(path, to_json(profile));
}

}  // namespace zeropage::profile
