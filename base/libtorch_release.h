// What differs between the releases of LibTorch that Zeropage is built with
// (cmake/libtorch_version.cmake), here and nowhere else.
#pragma once

#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

#include "zeropage/check.h"

namespace zeropage::base {

// How LibTorch holds a node of a graph: std::shared_ptr, and c10::intrusive_ptr in newer releases.
using NodePointer = decltype(torch::autograd::Edge::function);
inline constexpr bool kNodesAreShared =
    std::is_same_v<NodePointer, std::shared_ptr<torch::autograd::Node>>;

template <typename Node, typename... Arguments>
NodePointer make_node(Arguments&&... arguments) {
  if constexpr (kNodesAreShared) {
    return std::make_shared<Node>(std::forward<Arguments>(arguments)...);
  } else {
    return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
  }
}

template <typename Node = torch::autograd::Node>
auto weak(const NodePointer& node) {
  if constexpr (kNodesAreShared) {
    return std::weak_ptr<Node>(node);
  } else {
    return c10::weak_intrusive_ptr<Node>(node);
  }
}

// Bytes that are free on an accelerator, and all that it has.
inline std::pair<size_t, size_t> free_and_total_bytes(c10::Device device) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 10
  ZP_THROW(device, ": LibTorch ", TORCH_VERSION,
           " does not tell how much memory a device has; train on the CPU, or build Zeropage with "
           "LibTorch 2.10 or newer");
#else
  return c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index());
#endif
}

}  // namespace zeropage::base
