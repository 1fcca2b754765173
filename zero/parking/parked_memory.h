// Memory of a rank's device that is elsewhere for a while: the storages keep their tensors, and have other memory with the
// same bytes when it comes back.
//
//   put_away(place)   a copy is there, and nothing has changed here
//   leave()           the memory is free; who looks at a storage is told so (memory/absent_storage.h)
//   fetch()           there is new memory with the bytes, beside the storages
//   come_back()       the storages have it
//
// What throws leaves everything as it was. Lifetime: shares the storages. When it goes while they are away, their values are
// lost, and who looks at one is told that.
// Threads: the training thread, while nothing on the device uses them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>

#include "zero/parking/parking_place.h"
#include "zeropage/ledger.h"

namespace zeropage::zero {

class ParkedMemory {
 public:
  explicit ParkedMemory(c10::Device device);
  ~ParkedMemory();
  ParkedMemory(const ParkedMemory&) = delete;
  ParkedMemory& operator=(const ParkedMemory&) = delete;

  // The tensor's whole storage. Does nothing for one that is known, on another device, away already or without memory.
  void add(const at::Tensor& tensor, memory::Kind kind);
  // A storage whose memory lies in that tensor's, which was added, from that byte on.
  void add_within(const at::Tensor& whole, int64_t offset_bytes, const c10::Storage& inner);

  // What put_away() is to have room for.
  std::vector<ParkedPiece> pieces() const;
  int64_t bytes() const;

  void put_away(std::unique_ptr<ParkingPlace> place);
  // where: "on nvme".
  void leave(const std::string& where) noexcept;
  void fetch();
  void forget_fetched() { fetched_.clear(); }
  void come_back() noexcept;

 private:
  struct Piece {
    c10::Storage storage;
    memory::Kind kind;
  };
  struct Within {
    c10::Storage whole;
    int64_t offset_bytes;
    c10::Storage inner;
  };

  void say_that_it_is_away(const std::string& why) noexcept;

  const c10::Device device_;
  std::vector<Piece> pieces_;
  std::vector<Within> within_;
  std::unordered_set<const c10::StorageImpl*> known_;
  std::unique_ptr<ParkingPlace> place_;
  std::vector<at::Tensor> fetched_;  // by piece; undefined where nobody has its storage any more
  bool is_away_ = false;
};

}  // namespace zeropage::zero
