// Tensors of pages in a file on a local disk: each page's are one record (offload/nvme_file), which is
// read before it is used and written after it.
//
// Three buffers of the largest record: while one page is used, the next is read and the last
// written; more only while more pages are used at once. The file is made at the first use, when
// sizes are known. What is added later, as a parameter that was frozen begins to train, makes another record of its
// page, in another file. A record that was never written is not read, its tensors are as they began.
//
// Ledger: what is in the file, of the tier kNvme; buffers are kStaging.
// Threads: any, but for add().
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "offload/nvme_file.h"
#include "zero/tiers/tier_storage.h"
#include "zeropage/detail/pending.h"

namespace zeropage::zero {

class NvmeStorage final : public TierStorage {
 public:
  // Alignment of a tensor's place in its page's record.
  static constexpr int64_t kPieceAlignment = 64;
  // The buffers of the largest record: beside the page that is used, one reads ahead and one writes behind.
  static constexpr int64_t kBuffers = 3;

  // file: its directory, name and owner.
  explicit NvmeStorage(offload::NvmeFileOptions file);
  ~NvmeStorage() override;

  // Throws while the page is used.
  at::Tensor add(size_t page, int64_t numel, at::ScalarType dtype, double initial,
                 memory::Kind kind) override;
  void start_fetch(size_t page) override;
  void fetch(size_t page) override;
  void release(size_t page, Use use) override;
  bool stays() const override { return false; }
  int64_t buffer_bytes() const override;
  void release_buffers() override;

  // Where, how and how much; "" before the first use.
  std::string describe() const override;

 private:
  struct Piece {
    c10::Storage storage;
    int64_t begin = 0;  // in the record, in bytes
    int64_t numel = 0;
    at::ScalarType dtype = at::kFloat;
    double initial = 0;
    memory::Kind kind = memory::Kind::kOptimizerState;
  };
  struct Record {
    offload::NvmeFile* file = nullptr;  // null until the first use
    size_t number = 0;                  // there
    std::vector<Piece> pieces;
    int64_t bytes = 0;
    bool written = false;
    int uses = 0;
    bool dirty = false;
    bool has_memory = false;  // its pieces have
    at::Tensor buffer;        // while it is used or read ahead
    memory::Pending reading;  // into it
  };
  struct Writing {
    at::Tensor buffer;
    memory::Pending end;
  };

  void make_file();
  int64_t largest_buffer_bytes() const;
  void start_reading(Record& record);
  void release(Record& record, Use use);
  static void give_memory(Record& record);
  void keep_idle(const at::Tensor& buffer);
  at::Tensor take_buffer();
  static at::Tensor piece_in(const at::Tensor& buffer, const Piece& piece);

  const std::shared_ptr<memory::Ledger> ledger_;
  const offload::NvmeFileOptions options_;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::map<size_t, std::deque<Record>> records_;  // by page
  std::deque<offload::NvmeFile> files_;
  std::vector<at::Tensor> idle_;  // buffers
  std::deque<Writing> writing_;   // the earliest first
};

}  // namespace zeropage::zero
