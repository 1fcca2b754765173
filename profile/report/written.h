// A profile in a file whose end says what it is for.
#pragma once

#include <filesystem>
#include <string>

#include "profile/report/profile.h"

namespace zeropage::profile {

// What is wrong with the name of a file to write, in words; "": nothing.
std::string check_name(const std::filesystem::path& path);

// NAME.html: the page; NAME.trace.json: for Perfetto; another NAME.json: the profile. Throws ProfileError.
void write_profile(const Profile& profile, const std::filesystem::path& path);

}  // namespace zeropage::profile
