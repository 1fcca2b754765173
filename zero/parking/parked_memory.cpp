#include "zero/parking/parked_memory.h"

#include <utility>

#include <ATen/ATen.h>

#include "memory/absent_storage.h"
#include "memory/storage.h"

namespace zeropage::zero {
namespace {

c10::StorageImpl& impl_of(const c10::Storage& storage) {
  return *storage.unsafeGetStorageImpl();
}

}  // namespace

ParkedMemory::ParkedMemory(c10::Device device) : device_(device) {
  memory::check_absent_storages();
}

ParkedMemory::~ParkedMemory() {
  if (!is_away_) return;
  say_that_it_is_away(
      "this tensor is of a model that was destroyed while it was parked, and its values are gone: "
      "call resume() of a model before it goes");
}

void ParkedMemory::add(const at::Tensor& tensor, memory::Kind kind) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const c10::Storage& storage = tensor.storage();
  if (storage.device() != device_ || storage.nbytes() == 0) return;
  if (memory::is_absent(impl_of(storage)) || storage.data() == nullptr) return;
  if (known_.insert(&impl_of(storage)).second) pieces_.push_back({storage, kind});
}

void ParkedMemory::add_within(const at::Tensor& whole, int64_t offset_bytes,
                              const c10::Storage& inner) {
  TORCH_INTERNAL_ASSERT(known_.contains(&impl_of(whole.storage())));
  if (inner.nbytes() == 0 || !known_.insert(&impl_of(inner)).second) return;
  within_.push_back({whole.storage(), offset_bytes, inner});
}

std::vector<ParkedPiece> ParkedMemory::pieces() const {
  std::vector<ParkedPiece> pieces;
  for (const Piece& piece : pieces_) {
    pieces.push_back({static_cast<int64_t>(piece.storage.nbytes()), piece.kind});
  }
  return pieces;
}

int64_t ParkedMemory::bytes() const {
  int64_t bytes = 0;
  for (const Piece& piece : pieces_) bytes += static_cast<int64_t>(piece.storage.nbytes());
  return bytes;
}

void ParkedMemory::put_away(std::unique_ptr<ParkingPlace> place) {
  std::vector<at::Tensor> flat;
  for (const Piece& piece : pieces_) flat.push_back(memory::flat_over(piece.storage, at::kByte));
  place->put(flat);
  place_ = std::move(place);
}

void ParkedMemory::leave(const std::string& where) noexcept {
  is_away_ = true;
  say_that_it_is_away("this tensor is of a model that is parked " + where +
                      ": call its resume() before anything reads or writes it");
}

void ParkedMemory::say_that_it_is_away(const std::string& why) noexcept {
  for (const Within& of : within_) memory::make_absent(impl_of(of.inner), why);
  for (const Piece& piece : pieces_) memory::make_absent(impl_of(piece.storage), why);
}

void ParkedMemory::fetch() {
  std::vector<at::Tensor> fetched;
  for (const Piece& piece : pieces_) {
    at::Tensor& memory = fetched.emplace_back();
    // What held it may have gone meanwhile.
    if (piece.storage.use_count() == 1) continue;
    const memory::KindScope kind(piece.kind);
    memory = at::empty({static_cast<int64_t>(piece.storage.nbytes())},
                       at::TensorOptions(device_).dtype(at::kByte));
  }
  place_->get(fetched);
  fetched_ = std::move(fetched);
}

void ParkedMemory::come_back() noexcept {
  for (size_t index = 0; index < pieces_.size(); ++index) {
    if (!fetched_[index].defined()) continue;
    c10::StorageImpl& fetched = impl_of(fetched_[index].storage());
    memory::make_present(impl_of(pieces_[index].storage),
                         std::move(fetched._mutable_data_ptr_no_checks()));
  }
  for (const Within& of : within_) {
    if (memory::is_absent(impl_of(of.whole))) continue;
    const at::Tensor whole = memory::flat_over(of.whole, at::kByte);
    memory::make_present(
        impl_of(of.inner),
        memory::data_within(whole, of.offset_bytes, static_cast<int64_t>(of.inner.nbytes())));
  }
  fetched_.clear();
  is_away_ = false;
}

}  // namespace zeropage::zero
