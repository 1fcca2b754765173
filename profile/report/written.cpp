#include "profile/report/chrome_trace.h"
#include "profile/report/html_page.h"
#include "profile/report/profile_file.h"
#include "zeropage/profile.h"

namespace zeropage::profile {
namespace {

std::string check_end(const std::filesystem::path& path, const char* what, const char* end) {
  if (path.empty() || path.filename().string().ends_with(end)) return {};
  return "\"" + path.string() + "\": expected a name that ends in " + end + " for " + what;
}

}  // namespace

ProfileFiles ProfileFiles::by_name(const std::filesystem::path& path) {
  const std::string name = path.filename().string();
  ProfileFiles files;
  if (name.ends_with(".html")) {
    files.page = path;
  } else if (name.ends_with(".trace.json")) {
    files.trace = path;
  } else if (name.ends_with(".json")) {
    files.profile = path;
  } else {
    throw ProfileError("\"" + path.string() +
                       "\": expected a name that ends in .html for the page, "
                       "in .trace.json for "
                       "Perfetto, or in .json for the profile itself");
  }
  return files;
}

std::string check_names(const ProfileFiles& files) {
  std::string error = check_end(files.page, "the page", ".html");
  if (error.empty()) error = check_end(files.profile, "the profile", ".json");
  if (error.empty()) error = check_end(files.trace, "the trace", ".json");
  return error;
}

void write_files(const Profile& profile, const ProfileFiles& files, const Profile* other) {
  if (const std::string error = check_names(files); !error.empty()) throw ProfileError(error);
  if (!files.page.empty()) write_text(files.page, html_page(profile, other));
  if (!files.profile.empty()) write_text(files.profile, to_json(profile));
  if (!files.trace.empty()) write_text(files.trace, chrome_trace(profile));
}

}  // namespace zeropage::profile
