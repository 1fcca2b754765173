// What c10d/ProcessGroupGloo.hpp needs of Gloo's Context: see ../README.md.
#pragma once

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

namespace transport {
class UnboundBuffer;
}

}  // namespace gloo
