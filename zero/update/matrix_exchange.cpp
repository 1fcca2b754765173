#include "zero/update/matrix_exchange.h"

#include <algorithm>
#include <array>
#include <utility>

#include <ATen/ops/empty.h>

#include "zeropage/check.h"
#include "zeropage/communicator.h"

namespace zeropage {

class MatrixExchange::Run {
 public:
  Run(const ParameterPages& pages, std::span<const Matrix> matrices,
      const std::function<at::Tensor(size_t page)>& of_page)
      : pages_(pages),
        matrices_(matrices),
        of_page_(of_page),
        communicator_(pages.shards().communicator()),
        is_shared_(pages.plan().ownership() == Ownership::kWholePage) {}

  void perform() {
    gather_own();
    if (!is_shared_) travel("matrices to their owners", Way::kToOwner);
    for (size_t index = 0; index < matrices_.size(); ++index) {
      if (whole_[index].defined()) matrices_[index].transform(shaped(index));
    }
    travel("updates of matrices from their owners", Way::kFromOwner);
    scatter_own();
  }

 private:
  enum class Way : uint8_t { kToOwner, kFromOwner };
  static constexpr std::array kWireDtypes = {at::kFloat, at::kBFloat16};

  const PlacedParameter& placed(size_t index) const {
    return pages_.parameters()[matrices_[index].parameter];
  }

  // The elements of the matrix's page that the rank updates.
  Range held_by(int rank, size_t index) const {
    const PageLayout& layout = pages_.layouts()[placed(index).page];
    return is_shared_ ? Range{0, layout.numel} : layout.shard(rank);
  }

  // In the page.
  Range part_of(int rank, size_t index) const {
    return intersection(held_by(rank, index), placed(index).range);
  }

  bool is_own(size_t index) const { return matrices_[index].owner == communicator_.rank(); }

  at::Tensor in_whole(size_t index, const Range& part) const {
    return whole_[index].narrow(0, part.begin - placed(index).range.begin, part.numel());
  }

  at::Tensor in_page(size_t index, const Range& part) const {
    const size_t page = placed(index).page;
    return of_page_(page).narrow(0, part.begin - pages_.owned(page).begin, part.numel());
  }

  at::Tensor shaped(size_t index) const {
    const PlacedParameter& of = placed(index);
    const at::Tensor& like = of.parameter.tensor;
    const int64_t first = whole_[index].storage_offset() + of.offset - of.range.begin;
    return whole_[index].as_strided(like.sizes(), like.strides(), first);
  }

  void gather_own() {
    whole_.resize(matrices_.size());
    for (size_t index = 0; index < matrices_.size(); ++index) {
      if (!is_own(index)) continue;
      const Range range = placed(index).range;
      const Range part = part_of(communicator_.rank(), index);
      if (part.empty()) {
        whole_[index] = communicator_.buffer(range.numel(), at::kFloat);
        continue;
      }
      at::Tensor own = in_page(index, part);
      if (part == range && own.device() == communicator_.device()) {
        whole_[index] = std::move(own);
        continue;
      }
      whole_[index] = communicator_.buffer(range.numel(), at::kFloat);
      in_whole(index, part).copy_(own);
    }
  }

  void scatter_own() const {
    for (size_t index = 0; index < matrices_.size(); ++index) {
      if (!is_own(index)) continue;
      const Range part = part_of(communicator_.rank(), index);
      if (part.empty()) continue;
      const at::Tensor own = in_page(index, part);
      if (!whole_[index].is_alias_of(own)) own.copy_(in_whole(index, part));
    }
  }

  struct Message {
    int peer = 0;
    at::ScalarType dtype = at::kFloat;
    // Whether this rank sends it.
    bool is_sent = false;
    std::vector<size_t> matrices = {};
    at::Tensor buffer = {};
    comm::Pending pending = {};
  };

  // What the rank `from` sends to the rank `to`.
  Message message(int from, int to, Way way, at::ScalarType dtype) const {
    const int owner = way == Way::kToOwner ? to : from;
    const int other = way == Way::kToOwner ? from : to;
    const bool is_sent = from == communicator_.rank();
    Message made{.peer = is_sent ? to : from, .dtype = dtype, .is_sent = is_sent};
    int64_t numel = 0;
    for (size_t index = 0; index < matrices_.size(); ++index) {
      if (matrices_[index].owner != owner || matrices_[index].wire_dtype != dtype) continue;
      const Range part = part_of(other, index);
      if (part.empty()) continue;
      made.matrices.push_back(index);
      numel += part.numel();
    }
    if (numel > 0) made.buffer = communicator_.buffer(numel, dtype);
    return made;
  }

  // visit(piece of the buffer, the same in a matrix or page of this rank).
  template <typename Visit>
  void for_each_piece(const Message& message, Way way, const Visit& visit) const {
    const bool owns = message.is_sent == (way == Way::kFromOwner);
    const int other = owns ? message.peer : communicator_.rank();
    int64_t at = 0;
    for (const size_t index : message.matrices) {
      const Range part = part_of(other, index);
      visit(message.buffer.narrow(0, at, part.numel()),
            owns ? in_whole(index, part) : in_page(index, part));
      at += part.numel();
    }
  }

  void begin(Message& message, Way way, const char* what) const {
    if (message.is_sent) {
      for_each_piece(message, way,
                     [](const at::Tensor& to, const at::Tensor& from) { to.copy_(from); });
      message.pending = communicator_.send(message.buffer, message.peer, what);
    } else {
      message.pending = communicator_.recv(message.buffer, message.peer, what);
    }
  }

  void travel(const char* what, Way way) const {
    const int rank = communicator_.rank();
    const int ranks = communicator_.size();
    std::vector<Message> messages;
    for (int round = 0; round < ranks; ++round) {
      const int peer = (round - rank + ranks) % ranks;
      if (peer == rank) continue;
      for (const at::ScalarType dtype : kWireDtypes) {
        // Both begin with what the lower one sends.
        const int lower = std::min(rank, peer);
        const int upper = std::max(rank, peer);
        for (const auto& [from, to] : {std::pair(lower, upper), std::pair(upper, lower)}) {
          Message made = message(from, to, way, dtype);
          if (!made.buffer.defined()) continue;
          begin(made, way, what);
          messages.push_back(std::move(made));
        }
      }
    }
    for (const Message& message : messages) {
      message.pending.wait();
      if (message.is_sent) continue;
      for_each_piece(message, way,
                     [](const at::Tensor& from, const at::Tensor& to) { to.copy_(from); });
    }
  }

  const ParameterPages& pages_;
  const std::span<const Matrix> matrices_;
  const std::function<at::Tensor(size_t page)>& of_page_;
  comm::Communicator& communicator_;
  const bool is_shared_;           // each rank updates all elements
  std::vector<at::Tensor> whole_;  // by matrix, on its owner: [range numel] fp32
};

void MatrixExchange::run(std::span<const Matrix> matrices,
                         const std::function<at::Tensor(size_t page)>& of_page) const {
  Run(pages_, matrices, of_page).perform();
}

}  // namespace zeropage
