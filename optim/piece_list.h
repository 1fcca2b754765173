// Pieces of a stretch that one launch updates, as raw numbers: what the loops and kernels are given. Free of
// torch and of CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/flat_stretch.h"

namespace zeropage::optim {

// Where a piece begins, in elements of each buffer behind the stretch's pointer to it. Buffers of stretches
// that have memory of their own may lie before it.
struct ListedPiece {
  int64_t numel = 0;
  int64_t first_tile = 0;  // of its tiles, among those of the list
  int64_t values = 0;
  int64_t gradient = 0;
  int64_t copy_out = 0;
  int64_t states[kMostStates] = {};
};

// Elements from one address to another, which may be of memory of its own.
inline int64_t elements_between(const void* from, const void* to, size_t element_bytes) {
  const auto bytes = reinterpret_cast<intptr_t>(to) - reinterpret_cast<intptr_t>(from);
  return bytes / static_cast<int64_t>(element_bytes);
}

// Another stretch with the same types as the first, as a piece behind its pointers.
inline ListedPiece piece_behind(const FlatStretch& first, const FlatStretch& other) {
  ListedPiece piece{.numel = other.numel,
                    .values = elements_between(first.values, other.values, sizeof(float))};
  visit_types(first, [&]<typename Gradient, typename Copy>() {
    piece.gradient = elements_between(first.gradient, other.gradient, sizeof(Gradient));
    piece.copy_out = elements_between(first.copy_out, other.copy_out, sizeof(Copy));
  });
  for (int state = 0; state < kMostStates; ++state) {
    piece.states[state] = elements_between(first.states[state], other.states[state], sizeof(float));
  }
  return piece;
}

// What a block of a device's threads updates at once. Tiles begin at an aligned address, so the first one of a
// piece may begin before it.
inline constexpr int64_t kTileNumel = 2048;
inline constexpr int64_t kMostBeforePiece = 7;

// How many tiles a piece takes at most, wherever it lies.
constexpr int64_t tiles_of(int64_t numel) {
  return numel == 0 ? 0 : (numel + kMostBeforePiece + kTileNumel - 1) / kTileNumel;
}

// In the memory of the device that updates them.
struct PieceList {
  const ListedPiece* pieces = nullptr;
  const int32_t* piece_of_tile = nullptr;  // [tiles]
  int64_t tiles = 0;
};

// Pieces that travel as parameters of a launch, which have room for 4 KiB: none is in the device's memory.
struct PieceChunk {
  static constexpr int kMostPieces = 56;
  ListedPiece pieces[kMostPieces];
  int32_t count = 0;
  int64_t tiles = 0;
};

// The piece by itself. Gradient, Copy: the types of the stretch (visit_types).
template <typename Gradient, typename Copy>
ZEROPAGE_ELEMENT FlatStretch piece_of(const FlatStretch& stretch, const ListedPiece& piece) {
  FlatStretch of_piece = stretch;
  of_piece.values += piece.values;
  of_piece.gradient = static_cast<const Gradient*>(stretch.gradient) + piece.gradient;
  if (stretch.gradient_to_zero != nullptr) {
    of_piece.gradient_to_zero = static_cast<Gradient*>(stretch.gradient_to_zero) + piece.gradient;
  }
  if (stretch.copy_out != nullptr) {
    of_piece.copy_out = static_cast<Copy*>(stretch.copy_out) + piece.copy_out;
  }
  for (int state = 0; state < kMostStates; ++state) {
    if (stretch.states[state] != nullptr) of_piece.states[state] += piece.states[state];
  }
  of_piece.numel = piece.numel;
  return of_piece;
}

}  // namespace zeropage::optim
