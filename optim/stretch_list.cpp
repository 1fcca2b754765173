#include "optim/stretch_list.h"

#include <algorithm>
#include <utility>

#include "optim/checked_stretch.h"
#include "optim/packed_tensors.h"
#include "zeropage/check.h"

namespace zeropage::optim {
namespace {

bool are_alike(const FlatStretch& one, const FlatStretch& other) {
  if (one.gradient_precision != other.gradient_precision) return false;
  if ((one.copy_out == nullptr) != (other.copy_out == nullptr)) return false;
  return one.copy_out == nullptr ||
         (one.copy_precision == other.copy_precision && one.adopts_copy == other.adopts_copy);
}

void keep_storages(const Stretch& stretch, std::vector<c10::Storage>& storages) {
  storages.push_back(stretch.values.storage());
  storages.push_back(stretch.gradient.storage());
  if (stretch.copy_out.defined()) storages.push_back(stretch.copy_out.storage());
  for (const at::Tensor& state : stretch.states) storages.push_back(state.storage());
}

}  // namespace

StretchPieces::StretchPieces(const std::vector<StretchPiece>& pieces, const at::Device& device) {
  std::vector<ListedPiece> listed;
  listed.reserve(pieces.size());
  for (const StretchPiece& piece : pieces) {
    ZP_CHECK(piece.begin >= 0 && piece.first_state >= 0 && piece.numel >= 0, kFusedStep,
             ": pieces: expected them to begin at 0 or later, got one of ", piece.numel,
             " elements at ", piece.begin, ", with states at ", piece.first_state);
    if (piece.numel == 0) continue;
    ListedPiece& made = listed.emplace_back();
    made = {.numel = piece.numel,
            .values = piece.begin,
            .gradient = piece.begin,
            .copy_out = piece.begin};
    std::fill_n(made.states, kMostStates, piece.first_state);
    end_ = std::max(end_, piece.begin + piece.numel);
    state_end_ = std::max(state_end_, piece.first_state + piece.numel);
  }
  table_ = PieceTable(std::move(listed), device);
}

std::vector<StretchList::Alike> alike_of(std::span<const Stretch> stretches,
                                         const at::Device& table_on) {
  struct Found {
    FlatStretch first;
    std::vector<ListedPiece> pieces;
  };
  std::vector<Found> found;  // as many as there are combinations of dtypes
  for (const Stretch& stretch : stretches) {
    if (is_packed(stretch) || stretch.values.numel() == 0) continue;
    const FlatStretch flat = flat_of(stretch);
    auto at = std::find_if(found.begin(), found.end(),
                           [&](const Found& other) { return are_alike(other.first, flat); });
    if (at == found.end()) at = found.insert(found.end(), {flat, {}});
    at->pieces.push_back(piece_behind(at->first, flat));
  }
  std::vector<StretchList::Alike> alike;
  for (Found& of : found) {
    alike.push_back({of.first, {std::move(of.pieces), table_on}});
  }
  return alike;
}

StretchList::StretchList(std::vector<Stretch> stretches) : stretches_(std::move(stretches)) {
  for (const Stretch& stretch : stretches_) {
    check_stretch(stretch, stretches_.front().states.size());
    check_one_device(stretch, stretches_.front());
    if (is_packed(stretch)) {
      packed_.push_back(stretch);
    } else if (!stretch.values.is_meta()) {
      // What may be written to has memory of its own from here on.
      stretch.gradient.mutable_data_ptr();
      keep_storages(stretch, storages_);
    }
  }
  if (stretches_.empty() || stretches_.front().values.is_meta()) return;
  alike_ = alike_of(stretches_, stretches_.front().values.device());
}

}  // namespace zeropage::optim
