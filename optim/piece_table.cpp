#include "optim/piece_table.h"

#include <cstring>
#include <limits>
#include <utility>

#include <ATen/ops/empty.h>

#include "zeropage/check.h"

namespace zeropage::optim {
namespace {

// On the device, in the order of its current stream.
at::Tensor copied_to(const at::Device& device, const void* from, size_t bytes) {
  const at::Tensor here = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
  std::memcpy(here.mutable_data_ptr(), from, bytes);
  return here.to(device);
}

}  // namespace

PieceTable::PieceTable(std::vector<ListedPiece> pieces, const at::Device& device)
    : pieces_(std::move(pieces)) {
  ZP_CHECK(pieces_.size() <= static_cast<size_t>(std::numeric_limits<int32_t>::max()),
           "a list of stretches: expected less than 2^31, got ", pieces_.size(),
           "; make several calls");
  ends_.reserve(pieces_.size());
  std::vector<int32_t> piece_of_tile;
  int64_t end = 0;
  for (size_t index = 0; index < pieces_.size(); ++index) {
    ListedPiece& piece = pieces_[index];
    ends_.push_back(end += piece.numel);
    piece.first_tile = tiles_;
    const int64_t tiles = tiles_of(piece.numel);
    tiles_ += tiles;
    if (!device.is_cuda()) continue;
    piece_of_tile.insert(piece_of_tile.end(), static_cast<size_t>(tiles),
                         static_cast<int32_t>(index));
  }
  if (!device.is_cuda() || tiles_ == 0) return;
  pieces_there_ = copied_to(device, pieces_.data(), pieces_.size() * sizeof(ListedPiece));
  piece_of_tile_there_ =
      copied_to(device, piece_of_tile.data(), piece_of_tile.size() * sizeof(int32_t));
}

std::optional<PieceList> PieceTable::on_device() const {
  if (!pieces_there_.defined()) return std::nullopt;
  return PieceList{
      .pieces = static_cast<const ListedPiece*>(pieces_there_.const_data_ptr()),
      .piece_of_tile = static_cast<const int32_t*>(piece_of_tile_there_.const_data_ptr()),
      .tiles = tiles_};
}

}  // namespace zeropage::optim
