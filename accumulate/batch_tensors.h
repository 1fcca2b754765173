// The tensors of a batch. A batch is a tensor; a std::pair, std::tuple, std::array or std::vector
// of batches; a torch::data::Example; or a type of yours with a function beside it that applies
// `map` to each part that is a batch, and names it for errors:
//
//   struct Tokens { at::Tensor ids, mask; std::string source; };
//   Tokens map_parts(const Tokens& batch, const auto& map) {
//     return {map(batch.ids, "ids"), map(batch.mask, "mask"), batch.source};
//   }
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/data/example.h>

namespace zeropage::accumulate {
namespace detail {

template <typename>
inline constexpr bool kIsVector = false;
template <typename Part, typename Allocator>
inline constexpr bool kIsVector<std::vector<Part, Allocator>> = true;

template <typename>
inline constexpr bool kIsTuple = false;
template <typename... Parts>
inline constexpr bool kIsTuple<std::tuple<Parts...>> = true;
template <typename First, typename Second>
inline constexpr bool kIsTuple<std::pair<First, Second>> = true;
template <typename Part, size_t size>
inline constexpr bool kIsTuple<std::array<Part, size>> = true;

template <typename>
inline constexpr bool kIsExample = false;
template <typename Data, typename Target>
inline constexpr bool kIsExample<torch::data::Example<Data, Target>> = true;

}  // namespace detail

// The batch with function(tensor, name) in the place of each tensor; names are such as
// "batch[1].target" where `name` is "batch".
template <typename Batch, typename Function>
Batch map_tensors(const Batch& batch, const Function& function, const std::string& name) {
  const auto map = [&](const auto& part, std::string_view part_name) {
    return map_tensors(part, function, name + "." + std::string(part_name));
  };
  const auto map_element = [&](const auto& part, size_t index) {
    return map_tensors(part, function, name + "[" + std::to_string(index) + "]");
  };
  if constexpr (std::is_same_v<Batch, at::Tensor>) {
    return function(batch, name);
  } else if constexpr (detail::kIsVector<Batch>) {
    Batch mapped;
    mapped.reserve(batch.size());
    for (const auto& part : batch) mapped.push_back(map_element(part, mapped.size()));
    return mapped;
  } else if constexpr (detail::kIsTuple<Batch>) {
    return [&]<size_t... index>(std::index_sequence<index...>) {
      return Batch{map_element(std::get<index>(batch), index)...};
    }
    (std::make_index_sequence<std::tuple_size_v<Batch>>());
  } else if constexpr (detail::kIsExample<Batch>) {
    if constexpr (std::is_void_v<typename Batch::TargetType>) {
      return Batch{map(batch.data, "data")};
    } else {
      return Batch{map(batch.data, "data"), map(batch.target, "target")};
    }
  } else {
    static_assert(
        requires { map_parts(batch, map); },
        "micro_batches: this type is not known as a batch; declare beside it "
        "`T map_parts(const T& batch, const auto& map)` (accumulate/batch_tensors.h)");
    return map_parts(batch, map);
  }
}

}  // namespace zeropage::accumulate
