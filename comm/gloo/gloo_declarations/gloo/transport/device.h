// What c10d/ProcessGroupGloo.hpp needs of Gloo's Device: see ../../README.md.
#pragma once

namespace gloo::transport {
class Device;
}
