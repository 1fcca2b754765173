#include <type_traits>
#include <variant>

#include "optim/cuda/fused_group.cuh"
#include "optim/cuda/fused_step.h"
#include "optim/cuda/launch.cuh"

namespace zeropage::optim::cuda {
namespace {

static_assert(kTileNumel == int64_t{kThreads} * kInFlight);

// That every device takes with a launch.
constexpr size_t kParameterBytes = 4096;

// Where a piece lies against the groups of elements that are aligned. Buffers that begin at the same element of
// a group are aligned together; if one does not, none is taken to be.
struct Lead {
  int numel = 0;  // of a group, before the piece
  bool is_aligned = false;
};

template <int kCount, typename Element>
__device__ __forceinline__ int place_in_group(const Element* pointer) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(pointer) / sizeof(Element) % kCount);
}

template <typename Rule, typename Gradient, typename Copy>
__device__ __forceinline__ Lead lead_of(const FlatStretch& piece) {
  constexpr int kCount = kTogether<Gradient, Copy>;
  const auto* const gradient = static_cast<const Gradient*>(piece.gradient);
  const auto* const copies = static_cast<const Copy*>(piece.copy_out);
  // The lead of the narrowest tensor, which alone is aligned at one lead: others may be at several.
  int lead = place_in_group<kCount>(piece.values);
  if constexpr (sizeof(Gradient) == 2) {
    lead = place_in_group<kCount>(gradient);
  } else if constexpr (!std::is_same_v<Copy, NoCopy>) {
    lead = place_in_group<kCount>(copies);
  }
  bool all = is_aligned<kCount>(piece.values, lead) && is_aligned<kCount>(gradient, lead);
#pragma unroll
  for (int state = 0; state < Rule::kStates; ++state) {
    all = all && is_aligned<kCount>(piece.states[state], lead);
  }
  if constexpr (!std::is_same_v<Copy, NoCopy>) all = all && is_aligned<kCount>(copies, lead);
  return {.numel = all ? lead : 0, .is_aligned = all};
}

// Calls visit(i) for the elements of the tile that this thread has, one after the other.
template <typename Visit>
__device__ __forceinline__ void for_each_element(int64_t begin, int64_t numel, const Visit& visit) {
  const int64_t end = begin + kTileNumel < numel ? begin + kTileNumel : numel;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    if (i >= 0) visit(i);
  }
}

template <typename Rule, typename Gradient, typename Copy>
__device__ __forceinline__ void update_tile(const Rule& rule, const FlatStretch& piece,
                                            int64_t begin) {
  using Groups = Group<Rule, Gradient, Copy>;
  constexpr int kGroups = kInFlight / Groups::kCount;
  const auto first_of = [&](int k) {
    return begin + Groups::kCount * (threadIdx.x + k * int64_t{kThreads});
  };
  const auto is_whole = [&](int64_t first) {
    return first >= 0 && first + Groups::kCount <= piece.numel;
  };
  Groups groups[kGroups];
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    if (is_whole(first_of(k))) groups[k].load_all(piece, first_of(k));
  }
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    const int64_t first = first_of(k);
    if (is_whole(first)) {
      groups[k].update_and_store(rule, piece, first);
      continue;
    }
    // At the piece's ends.
    for (int64_t i = first < 0 ? 0 : first; i < first + Groups::kCount && i < piece.numel; ++i) {
      update_one<Rule, Gradient, Copy>(rule, piece, i);
    }
  }
}

// The last one that begins there or before.
__device__ __forceinline__ const ListedPiece& piece_with(const PieceChunk& chunk, int64_t tile) {
  int found = 0;
  for (int end = chunk.count; end - found > 1;) {
    const int middle = (found + end) / 2;
    (chunk.pieces[middle].first_tile <= tile ? found : end) = middle;
  }
  return chunk.pieces[found];
}

// Steps the pieces of the chunk, or those of the list where the chunk is empty.
template <typename Rule, typename Gradient, typename Copy>
__global__ void __launch_bounds__(kThreads)
    update_pieces(const __grid_constant__ Rule rule, const __grid_constant__ FlatStretch stretch,
                  const __grid_constant__ PieceList list,
                  const __grid_constant__ PieceChunk chunk) {
  static_assert(sizeof(Rule) + sizeof(FlatStretch) + sizeof(PieceList) + sizeof(PieceChunk) <=
                kParameterBytes);
  const bool is_made = stretch.found_inf == nullptr || *stretch.found_inf == 0.0F;
  const int64_t tiles = list.tiles + chunk.tiles;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const ListedPiece& listed =
        chunk.count == 0 ? list.pieces[list.piece_of_tile[tile]] : piece_with(chunk, tile);
    const FlatStretch piece = piece_of<Gradient, Copy>(stretch, listed);
    const Lead lead = lead_of<Rule, Gradient, Copy>(piece);
    const int64_t begin = (tile - listed.first_tile) * kTileNumel - lead.numel;
    if (is_made && lead.is_aligned) {
      update_tile<Rule, Gradient, Copy>(rule, piece, begin);
    } else if (is_made) {
      for_each_element(begin, piece.numel,
                       [&](int64_t i) { update_one<Rule, Gradient, Copy>(rule, piece, i); });
    } else if (piece.gradient_to_zero != nullptr) {
      for_each_element(begin, piece.numel, [&](int64_t i) {
        static_cast<Gradient*>(piece.gradient_to_zero)[i] = Gradient{};
      });
    }
  }
}

void update(const UpdateRule& rule, const FlatStretch& stretch, const PieceList& list,
            const PieceChunk& chunk, void* stream) {
  const int64_t tiles = list.tiles + chunk.tiles;
  if (tiles == 0) return;
  std::visit(
      [&]<typename Rule>(const Rule& of_class) {
        visit_types(stretch, [&]<typename Gradient, typename Copy>() {
          launch({.what = "the launch of a fused step of pieces",
                  .blocks = blocks_for(tiles, /*per_block=*/1),
                  .stream = stream},
                 update_pieces<Rule, Gradient, Copy>, of_class, stretch, list, chunk);
        });
      },
      rule);
}

}  // namespace

void fused_step_of_pieces(const UpdateRule& rule, const FlatStretch& stretch, const PieceList& list,
                          void* stream) {
  update(rule, stretch, list, {}, stream);
}

void fused_step_of_pieces(const UpdateRule& rule, const FlatStretch& stretch,
                          std::span<const ListedPiece> pieces, void* stream) {
  for (size_t next = 0; next < pieces.size();) {
    PieceChunk chunk;
    for (; next < pieces.size() && chunk.count < PieceChunk::kMostPieces; ++next) {
      ListedPiece& piece = chunk.pieces[chunk.count++];
      piece = pieces[next];
      piece.first_tile = chunk.tiles;
      chunk.tiles += tiles_of(piece.numel);
    }
    update(rule, stretch, {}, chunk, stream);
  }
}

}  // namespace zeropage::optim::cuda
