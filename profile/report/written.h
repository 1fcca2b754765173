// A profile in files: the page, the profile itself, the trace for Perfetto.
#pragma once

#include <filesystem>
#include <string>

#include "profile/report/profile.h"

namespace zeropage::profile {

// Each empty: not written.
struct ProfileFiles {
  std::filesystem::path page;     // NAME.html, which needs no network
  std::filesystem::path profile;  // NAME.json, for `zp report`
  std::filesystem::path trace;    // NAME.json, for ui.perfetto.dev and chrome://tracing

  // By the end of a name: .html the page, .trace.json the trace, another .json
  // the profile. Throws ProfileError for another end.
  static ProfileFiles by_name(const std::filesystem::path& path);
};

// What is wrong with the names, in words; "": nothing.
std::string check_names(const ProfileFiles& files);

// other: a run that the page compares with; null: none. Throws ProfileError.
void write_files(const Profile& profile, const ProfileFiles& files, const Profile* other = nullptr);

}  // namespace zeropage::profile
