// The CUDA functions of builds without CUDA.
#include "optim/cuda/bit_hashes.h"
#include "optim/cuda/block_hashes.h"
#include "optim/cuda/current_stream.h"
#include "optim/cuda/flat_norm.h"
#include "optim/cuda/fused_step.h"
#include "optim/cuda/packed_step.h"
#include "optim/cuda/stochastic_rounding.h"
#include "zeropage/check.h"

namespace zeropage::optim::cuda {
namespace {

[[noreturn]] void refuse(const char* what) {
  ZP_THROW(what,
           ": its tensors are on a CUDA device, but this Zeropage was built without CUDA; build it "
           "with -DZEROPAGE_CUDA=ON (cmake --preset cuda), or keep the tensors on the CPU");
}

}  // namespace

bool is_built() {
  return false;
}

void* current_stream(const c10::Device& /*device*/) {
  refuse("the current stream");
}

void fused_step(const UpdateRule& /*rule*/, const FlatStretch& /*stretch*/, void* /*stream*/) {
  refuse("fused_step");
}

void fused_step_of_pieces(const UpdateRule& /*rule*/, const FlatStretch& /*stretch*/,
                          const PieceList& /*list*/, void* /*stream*/) {
  refuse("fused_step");
}

void fused_step_of_pieces(const UpdateRule& /*rule*/, const FlatStretch& /*stretch*/,
                          std::span<const ListedPiece> /*pieces*/, void* /*stream*/) {
  refuse("fused_step");
}

void packed_step(const UpdateRule& /*rule*/, const PackedStretch& /*stretch*/, void* /*stream*/) {
  refuse("fused_step");
}

void add_norm_parts(const FlatElements& /*flat*/, const NormPart* /*parts*/,
                    const NormRange* /*ranges*/, int64_t /*most_blocks*/,
                    const NormWords& /*words*/, void* /*stream*/) {
  refuse("NormTable::add_squares");
}

void block_hashes(const uint32_t* /*words*/, int64_t /*block_words*/, int64_t /*blocks*/,
                  uint64_t* /*hashes*/, void* /*stream*/) {
  refuse("block_hashes");
}

void bit_hashes(const HashedPiece* /*pieces*/, int64_t /*count*/, int64_t /*tiles*/,
                uint64_t* /*hashes*/, void* /*stream*/) {
  refuse("bit_hashes");
}

void look_for_not_finite(const FlatElements& /*flat*/, int64_t /*numel*/, float* /*found*/,
                         void* /*stream*/) {
  refuse("found_inf");
}

void round_stochastically(const float* /*from*/, BFloat16Bits* /*to*/, int64_t /*numel*/,
                          const RoundingPlace& /*place*/, void* /*stream*/) {
  refuse("round_stochastically");
}

}  // namespace zeropage::optim::cuda
