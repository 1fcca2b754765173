#include "profile/report/html_page.h"

#include <algorithm>
#include <stdexcept>
#include <string_view>

#include "profile/report/page_data.h"
#include "profile/report/page_files.h"

namespace zeropage::profile {
namespace {

void put(std::string& page, std::string_view place, std::string_view text) {
  const size_t at = page.find(place);
  if (at == std::string::npos) {
    throw std::logic_error("page.html has no place \"" + std::string(place) + "\"");
  }
  page.replace(at, place.size(), text);
}

// Text that a browser does not read as markup.
std::string escaped(std::string_view text) {
  std::string result;
  for (const char letter : text) {
    switch (letter) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += letter;
    }
  }
  return result;
}

// JSON within a script element, which ends at the first "</".
std::string within_script(std::string text) {
  for (size_t at = text.find('<'); at != std::string::npos; at = text.find('<', at)) {
    text.replace(at, 1, "\\u003c");
  }
  return text;
}

}  // namespace

std::string html_page(const Profile& profile, const Profile* other) {
  PageDetail detail;
  std::string data = page_data(profile, other, detail);
  // What the page has besides its data.
  const size_t rest = page_html().size() + page_css().size() + page_js().size() + 4096;
  while (data.size() + rest > kMostPageBytes && detail.halve()) {
    data = page_data(profile, other, detail);
  }
  std::string page(page_html());
  put(page, "@STYLE@", page_css());
  put(page, "@SCRIPT@", page_js());
  // Last, and the title behind the data, before which it stands: their texts may hold what looks like a place.
  put(page, "@DATA@", within_script(std::move(data)));
  put(page, "@TITLE@", escaped(profile.title));
  return page;
}

}  // namespace zeropage::profile
