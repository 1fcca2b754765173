// A profile as one page of HTML that needs nothing else: no network, no other file.
//
// The page has fewer moments and spans than the profile where it would grow past kMostPageBytes; the peaks,
// the longest spans and all figures of the tables stay exact.
#pragma once

#include <cstddef>
#include <string>

#include "zeropage/profile.h"

namespace zeropage::profile {

inline constexpr size_t kMostPageBytes = 2'000'000;

// other: a run to compare with; null: none.
std::string html_page(const Profile& profile, const Profile* other = nullptr);

}  // namespace zeropage::profile
