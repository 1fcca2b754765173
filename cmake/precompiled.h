// What nearly every source includes; torch/torch.h alone takes g++ 50 s.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include <torch/torch.h>
