// The tensors of a structure. A structure is a tensor or an std::optional of one; a std::pair,
// std::tuple, std::array or std::vector of structures; a torch::data::Example; or a type of yours
// with a function beside it that applies `map` to each part that is a structure, and names it for
// errors:
//
//   struct Tokens { at::Tensor ids, mask; std::string source; };
//   Tokens map_parts(const Tokens& batch, const auto& map) {
//     return {map(batch.ids, "ids"), map(batch.mask, "mask"), batch.source};
//   }
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/data/example.h>

namespace zeropage::memory {
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

struct AnyPart {
  template <typename Part>
  Part operator()(const Part& part, std::string_view) const {
    return part;
  }
};

}  // namespace detail

// Whether map_tensors looks into a type; it leaves values of all others as they are.
template <typename T>
inline constexpr bool kIsStructure = std::is_same_v<T, at::Tensor> ||
                                     std::is_same_v<T, std::optional<at::Tensor>> ||
                                     detail::kIsVector<T> || detail::kIsTuple<T> ||
                                     detail::kIsExample<T> ||
                                     requires(const T& structure, const detail::AnyPart& any) {
  map_parts(structure, any);
};

// The structure with function(tensor, name) in the place of each tensor, undefined ones too; names
// are such as "batch[1].target" where `name` is "batch".
template <typename Structure, typename Function>
Structure map_tensors(const Structure& structure, const Function& function,
                      const std::string& name) {
  const auto map = [&](const auto& part, std::string_view part_name) {
    return map_tensors(part, function, name + "." + std::string(part_name));
  };
  const auto map_element = [&](const auto& part, size_t index) {
    return map_tensors(part, function, name + "[" + std::to_string(index) + "]");
  };
  if constexpr (std::is_same_v<Structure, at::Tensor>) {
    return function(structure, name);
  } else if constexpr (std::is_same_v<Structure, std::optional<at::Tensor>>) {
    return structure ? Structure(function(*structure, name)) : structure;
  } else if constexpr (detail::kIsVector<Structure>) {
    Structure mapped;
    mapped.reserve(structure.size());
    for (const auto& part : structure) mapped.push_back(map_element(part, mapped.size()));
    return mapped;
  } else if constexpr (detail::kIsTuple<Structure>) {
    return [&]<size_t... index>(std::index_sequence<index...>) {
      return Structure{map_element(std::get<index>(structure), index)...};
    }
    (std::make_index_sequence<std::tuple_size_v<Structure>>());
  } else if constexpr (detail::kIsExample<Structure>) {
    if constexpr (std::is_void_v<typename Structure::TargetType>) {
      return Structure{map(structure.data, "data")};
    } else {
      return Structure{map(structure.data, "data"), map(structure.target, "target")};
    }
  } else if constexpr (kIsStructure<Structure>) {
    return map_parts(structure, map);
  } else {
    return structure;
  }
}

}  // namespace zeropage::memory
