// Pieces of stretches that are updated together, in the memory of the host and, for as many steps as there are, in
// that of the CUDA device that updates them.
//
// 72 bytes a piece, on a device 64 more, and there 4 for each 2048 elements. They are copied there once, which
// waits for the device's current stream.
//
// Threads: constant. Throws where there are 2^31 pieces or more.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "optim/piece_list.h"

namespace zeropage::optim {

class PieceTable {
 public:
  PieceTable() = default;
  // device: that has a copy of them, if it is a CUDA one. first_tile is set here.
  PieceTable(std::vector<ListedPiece> pieces, const at::Device& device);

  bool empty() const { return pieces_.empty(); }
  const std::vector<ListedPiece>& pieces() const { return pieces_; }
  // Where each piece ends, in elements, as if they were one behind the other from 0 on.
  const std::vector<int64_t>& ends() const { return ends_; }
  int64_t numel() const { return ends_.empty() ? 0 : ends_.back(); }
  // None where no device has a copy.
  std::optional<PieceList> on_device() const;

 private:
  std::vector<ListedPiece> pieces_;
  std::vector<int64_t> ends_;
  int64_t tiles_ = 0;
  at::Tensor pieces_there_;         // their bytes
  at::Tensor piece_of_tile_there_;  // [tiles] int32
};

}  // namespace zeropage::optim
