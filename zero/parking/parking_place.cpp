#include "zero/parking/parking_place.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include <ATen/ATen.h>

#include "device/topology.h"
#include "offload/nvme_file.h"
#include "zero/tiers/tier_storage.h"
#include "zeropage/bytes.h"

namespace zeropage::zero {
namespace {

using memory::operator""_MiB;

class HostPlace final : public ParkingPlace {
 public:
  HostPlace(c10::Device device, const std::vector<ParkedPiece>& pieces) {
    HostStorage host(device, device::own_core_set());
    for (const ParkedPiece& piece : pieces) {
      there_.push_back(host.add(/*page=*/0, piece.bytes, at::kByte, 0, piece.kind));
    }
  }

  void put(const std::vector<at::Tensor>& pieces) override {
    for (size_t index = 0; index < pieces.size(); ++index) there_[index].copy_(pieces[index]);
  }
  void get(const std::vector<at::Tensor>& pieces) override {
    for (size_t index = 0; index < pieces.size(); ++index) {
      if (pieces[index].defined()) at::Tensor(pieces[index]).copy_(there_[index]);
    }
  }

 private:
  std::vector<at::Tensor> there_;  // by piece
};

class NvmePlace final : public ParkingPlace {
 public:
  NvmePlace(const ParkingPlaceOptions& options, const std::vector<ParkedPiece>& pieces)
      : ledger_(memory::Ledger::current()), pieces_(pieces) {
    std::vector<int64_t> record_bytes;
    for (size_t index = 0; index < pieces.size(); ++index) {
      for (int64_t begin = 0; begin < pieces[index].bytes; begin += kChunkBytes) {
        chunks_.push_back({index, begin, std::min(kChunkBytes, pieces[index].bytes - begin)});
        record_bytes.push_back(chunks_.back().bytes);
      }
    }
    if (!chunks_.empty()) {
      file_.emplace(offload::NvmeFileOptions{.directory = options.directory,
                                             .name = options.name,
                                             .owner = "a parked model",
                                             .host_bytes_allowed = 0},
                    record_bytes);
    }
    for (const ParkedPiece& piece : pieces_) {
      ledger_->charge_offloaded(memory::Tier::kNvme, piece.kind, piece.bytes);
    }
  }
  ~NvmePlace() override {
    for (const ParkedPiece& piece : pieces_) {
      ledger_->discharge_offloaded(memory::Tier::kNvme, piece.kind, piece.bytes);
    }
  }

  // One chunk is copied while the one before is written.
  void put(const std::vector<at::Tensor>& pieces) override {
    Buffers buffers = make_buffers();
    for (size_t index = 0; index < chunks_.size(); ++index) {
      Buffer& buffer = buffers[index % buffers.size()];
      std::exchange(buffer.on_its_way, {}).wait();
      in(buffer, chunks_[index]).copy_(in(pieces, chunks_[index]));
      buffer.on_its_way = file_->start_write(index, buffer.memory);
    }
    for (Buffer& buffer : buffers) std::exchange(buffer.on_its_way, {}).wait();
  }

  // One chunk is read while the one before is copied.
  void get(const std::vector<at::Tensor>& pieces) override {
    std::vector<size_t> wanted;
    for (size_t index = 0; index < chunks_.size(); ++index) {
      if (pieces[chunks_[index].piece].defined()) wanted.push_back(index);
    }
    Buffers buffers = make_buffers();
    const auto start = [&](size_t place) {
      if (place >= wanted.size()) return;
      Buffer& buffer = buffers[place % buffers.size()];
      buffer.on_its_way = file_->start_read(wanted[place], buffer.memory);
    };
    start(0);
    for (size_t place = 0; place < wanted.size(); ++place) {
      start(place + 1);
      Buffer& buffer = buffers[place % buffers.size()];
      std::exchange(buffer.on_its_way, {}).wait();
      in(pieces, chunks_[wanted[place]]).copy_(in(buffer, chunks_[wanted[place]]));
    }
  }

 private:
  static constexpr int64_t kChunkBytes = 16_MiB;

  // A record of the file.
  struct Chunk {
    size_t piece = 0;
    int64_t begin = 0;  // in the piece
    int64_t bytes = 0;
  };
  struct Buffer {
    at::Tensor memory;  // uint8, of the largest record
    memory::Pending on_its_way;
  };
  using Buffers = std::array<Buffer, 2>;

  Buffers make_buffers() const {
    Buffers buffers;
    for (Buffer& buffer : buffers) {
      if (file_) buffer.memory = offload::make_buffer(file_->largest_buffer_bytes());
    }
    return buffers;
  }
  static at::Tensor in(const Buffer& buffer, const Chunk& chunk) {
    return buffer.memory.narrow(0, 0, chunk.bytes);
  }
  static at::Tensor in(const std::vector<at::Tensor>& pieces, const Chunk& chunk) {
    return pieces[chunk.piece].narrow(0, chunk.begin, chunk.bytes);
  }

  const std::shared_ptr<memory::Ledger> ledger_;
  const std::vector<ParkedPiece> pieces_;
  std::vector<Chunk> chunks_;              // by record
  std::optional<offload::NvmeFile> file_;  // none where there is nothing to park
};

}  // namespace

std::unique_ptr<ParkingPlace> make_parking_place(const ParkingPlaceOptions& options,
                                                 const std::vector<ParkedPiece>& pieces) {
  TORCH_INTERNAL_ASSERT(options.tier != memory::Tier::kDevice);
  if (options.tier == memory::Tier::kHost) {
    return std::make_unique<HostPlace>(options.device, pieces);
  }
  return std::make_unique<NvmePlace>(options, pieces);
}

}  // namespace zeropage::zero
