// Where the memory of a parked model is until it comes back: page-locked memory of the host, or a file on NVMe.
//
// What is there is charged to the ledger's account of the tier. The file is scratch (offload/nvme_file.h): it goes with the
// place. Its bytes pass through two buffers of up to 16 MiB on the host, which there are only while they do. A write that
// the disk refuses throws, and does not fall back to host memory.
//
// Threads: one at a time. Throws c10::Error where memory, a folder, room or a disk is not there.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zeropage/ledger.h"

namespace zeropage::zero {

struct ParkedPiece {
  int64_t bytes = 0;
  memory::Kind kind = memory::Kind::kParameter;
};

class ParkingPlace {
 public:
  virtual ~ParkingPlace() = default;
  ParkingPlace(const ParkingPlace&) = delete;
  ParkingPlace& operator=(const ParkingPlace&) = delete;

  // pieces: uint8, [bytes] each, on the device.
  virtual void put(const std::vector<at::Tensor>& pieces) = 0;
  // The same, written to; those that are undefined are left out. REQUIRES: put().
  virtual void get(const std::vector<at::Tensor>& pieces) = 0;

 protected:
  ParkingPlace() = default;
};

struct ParkingPlaceOptions {
  memory::Tier tier = memory::Tier::kHost;  // or kNvme
  c10::Device device;                       // of the pieces
  std::string directory;                    // for kNvme
  std::string name;                         // of the file there, no other rank's
};

// Takes the room for all of them.
std::unique_ptr<ParkingPlace> make_parking_place(const ParkingPlaceOptions& options,
                                                 const std::vector<ParkedPiece>& pieces);

}  // namespace zeropage::zero
