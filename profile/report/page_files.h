// The page's own files (profile/report/page/), which the build puts into the library.
#pragma once

#include <string_view>

namespace zeropage::profile {

std::string_view page_html();
std::string_view page_css();
std::string_view page_js();

}  // namespace zeropage::profile
