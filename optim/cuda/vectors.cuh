// Elements of a thread that lie behind each other in memory, in accesses of 16 bytes, or of 8 where
// there are no more. The addresses are aligned to the access.
#pragma once

#include <cstdint>
#include <cstring>
#include <cuda_runtime.h>
#include <type_traits>

namespace zeropage::optim::cuda {

template <typename Element, int kCount>
struct Elements {
  Element at[kCount];
};

// What a thread accesses at once.
template <typename Element, int kCount>
using VectorOf =
    std::conditional_t<sizeof(Elements<Element, kCount>) == sizeof(uint2), uint2, uint4>;

template <typename Element, int kCount>
__device__ __forceinline__ void load(const Element* from, Elements<Element, kCount>& to) {
  using Vector = VectorOf<Element, kCount>;
  constexpr int kVectors = sizeof(to) / sizeof(Vector);
  static_assert(kVectors * sizeof(Vector) == sizeof(to));
  Vector vectors[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) vectors[i] = reinterpret_cast<const Vector*>(from)[i];
  memcpy(&to, vectors, sizeof(to));
}

// nvcc may split an assignment into narrow stores; __stwb is one wide one.
template <typename Element, int kCount>
__device__ __forceinline__ void store(Element* to, const Elements<Element, kCount>& from) {
  using Vector = VectorOf<Element, kCount>;
  constexpr int kVectors = sizeof(from) / sizeof(Vector);
  Vector vectors[kVectors];
  memcpy(vectors, &from, sizeof(from));
#pragma unroll
  for (int i = 0; i < kVectors; ++i) __stwb(reinterpret_cast<Vector*>(to) + i, vectors[i]);
}

// Whether the element that lies `before` elements before `pointer` can be loaded and stored so.
template <int kCount, typename Element>
__host__ __device__ __forceinline__ bool is_aligned(const Element* pointer, int64_t before = 0) {
  const uintptr_t address =
      reinterpret_cast<uintptr_t>(pointer) - static_cast<uintptr_t>(before) * sizeof(Element);
  return address % sizeof(VectorOf<Element, kCount>) == 0;
}

}  // namespace zeropage::optim::cuda
