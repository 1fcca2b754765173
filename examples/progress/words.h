// Numbers in lines that people read while a program works.
#pragma once

#include <string>
#include <vector>

namespace examples {

// "12s", "3m 20s", "12h 5m". "0s" where it is less than nothing, and "?" where it is not finite.
std::string duration(double seconds);

// So many digits behind the point; from a million on as 1.2e+30, since a loss that diverges would be 30 digits long.
std::string fixed(double value, int digits);

// The parts, with ", " between them, as far as they have room: the first always, and of the others those with which the
// line is no longer than 79 characters. A terminal of 80 columns can replace such a line.
std::string line_of(const std::vector<std::string>& parts);

}  // namespace examples
