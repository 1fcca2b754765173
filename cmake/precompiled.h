// What nearly every source of the library includes: g++ takes 25 s for it. Not torch/torch.h, which takes 50 s and makes g++
// instantiate templates for 8 s in every source that sees it: the library names what it uses of LibTorch.
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

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>
#include <torch/serialize/archive.h>
