// The fused steps as CUDA kernels. In builds without CUDA no_cuda.cpp has these functions, and all
// but is_built() throw. Free of torch and of CUDA.
//
// `stream` is a cudaStream_t of the current device; the kernels are queued there, and what the
// pointers point to must live until they ran. Throws std::runtime_error when a launch
// fails.
#pragma once

#include <span>

#include "optim/flat_stretch.h"
#include "optim/piece_list.h"
#include "optim/update_rule.h"

namespace zeropage::optim::cuda {

bool is_built();

void fused_step(const UpdateRule& rule, const FlatStretch& stretch, void* stream);

// Pieces of the stretch, in one launch; its numel says nothing.
void fused_step_of_pieces(const UpdateRule& rule, const FlatStretch& stretch, const PieceList& list,
                          void* stream);
// The same of pieces in the host's memory, which go along with launches of PieceChunk::kMostPieces each; their
// first_tile says nothing.
void fused_step_of_pieces(const UpdateRule& rule, const FlatStretch& stretch,
                          std::span<const ListedPiece> pieces, void* stream);

}  // namespace zeropage::optim::cuda
