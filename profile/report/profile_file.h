// Profiles as files: JSON, "zeropage-profile" version 1 (profile/FORMAT.md).
//
// Throws ProfileError, which names the file and says what is wrong with it: one that was cut off, one of
// another version, one that contradicts itself. Nothing of such a file is used.
#pragma once

#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>

#include "zeropage/profile.h"

namespace zeropage::profile {

inline constexpr int kFormatVersion = 1;

class ProfileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

std::string to_json(const Profile& profile);
// name: of the text, for errors.
Profile parse_profile(std::string_view text, const std::string& name);

Profile read_profile(const std::filesystem::path& path);
// A file is there whole, or as it was before.
void write_text(const std::filesystem::path& path, std::string_view text);

}  // namespace zeropage::profile
