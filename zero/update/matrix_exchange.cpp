#include "zero/update/matrix_exchange.h"

#include <algorithm>
#include <array>
#include <utility>

#include <ATen/ops/empty.h>

#include "zeropage/check.h"
#include "zeropage/communicator.h"

namespace zeropage::zero {
namespace {

constexpr std::array kWireDtypes = {at::kFloat, at::kBFloat16};

comm::Communicator& communicator_of(const ParameterPages& pages) {
  return pages.shards().communicator();
}

}  // namespace

MatrixExchange::MatrixExchange(const ParameterPages& pages, std::vector<Matrix> matrices,
                               OfPage of_page)
    : pages_(pages),
      matrices_(std::move(matrices)),
      of_page_(std::move(of_page)),
      is_shared_(pages.plan().ownership() == Ownership::kWholePage),
      whole_(matrices_.size()) {}

void MatrixExchange::begin() {
  if (!is_shared_) depart(Way::kToOwner, "matrices to their owners");
}

void MatrixExchange::transform() {
  gather_own();
  arrive(Way::kToOwner);
  for (size_t index = 0; index < matrices_.size(); ++index) {
    if (whole_[index].defined()) matrices_[index].transform(shaped(index));
  }
  depart(Way::kFromOwner, "updates of matrices from their owners");
  scatter_own();
}

void MatrixExchange::finish() {
  arrive(Way::kFromOwner);
}

// The elements of the matrix's page that the rank updates.
Range MatrixExchange::held_by(int rank, size_t index) const {
  const PageLayout& layout = pages_.layouts()[placed(index).page];
  return is_shared_ ? Range{0, layout.numel} : layout.shard(rank);
}

at::Tensor MatrixExchange::in_whole(size_t index, const Range& part) const {
  return whole_[index].narrow(0, part.begin - placed(index).range.begin, part.numel());
}

at::Tensor MatrixExchange::in_page(size_t index, const Range& part) const {
  const size_t page = placed(index).page;
  return of_page_(page).narrow(0, part.begin - pages_.owned(page).begin, part.numel());
}

at::Tensor MatrixExchange::shaped(size_t index) const {
  const PlacedParameter& of = placed(index);
  const at::Tensor& like = of.parameter.tensor;
  const int64_t first = whole_[index].storage_offset() + of.offset - of.range.begin;
  return whole_[index].as_strided(like.sizes(), like.strides(), first);
}

void MatrixExchange::gather_own() {
  const comm::Communicator& communicator = communicator_of(pages_);
  for (size_t index = 0; index < matrices_.size(); ++index) {
    if (matrices_[index].owner != communicator.rank()) continue;
    const Range range = placed(index).range;
    const Range part = part_of(communicator.rank(), index);
    if (part.empty()) {
      whole_[index] = communicator.buffer(range.numel(), at::kFloat);
      continue;
    }
    at::Tensor own = in_page(index, part);
    if (part == range && own.device() == communicator.device()) {
      whole_[index] = std::move(own);
      continue;
    }
    whole_[index] = communicator.buffer(range.numel(), at::kFloat);
    in_whole(index, part).copy_(own);
  }
}

// What others get is in the messages by now.
void MatrixExchange::scatter_own() {
  for (size_t index = 0; index < matrices_.size(); ++index) {
    if (!whole_[index].defined()) continue;
    const Range part = part_of(communicator_of(pages_).rank(), index);
    if (!part.empty()) {
      const at::Tensor own = in_page(index, part);
      if (!whole_[index].is_alias_of(own)) own.copy_(in_whole(index, part));
    }
    whole_[index].reset();
  }
}

// What the rank `from` sends to the rank `to`.
MatrixExchange::Message MatrixExchange::message(int from, int to, Way way,
                                                at::ScalarType dtype) const {
  const int owner = way == Way::kToOwner ? to : from;
  const int other = way == Way::kToOwner ? from : to;
  const bool is_sent = from == communicator_of(pages_).rank();
  Message made{.peer = is_sent ? to : from, .dtype = dtype, .is_sent = is_sent};
  int64_t numel = 0;
  for (size_t index = 0; index < matrices_.size(); ++index) {
    if (matrices_[index].owner != owner || matrices_[index].wire_dtype != dtype) continue;
    const Range part = part_of(other, index);
    if (part.empty()) continue;
    made.matrices.push_back(index);
    numel += part.numel();
  }
  if (numel > 0) made.buffer = communicator_of(pages_).buffer(numel, dtype);
  return made;
}

// visit(piece of the buffer, the same in a matrix or page of this rank).
template <typename Visit>
void MatrixExchange::for_each_piece(const Message& message, Way way, const Visit& visit) const {
  const bool owns = message.is_sent == (way == Way::kFromOwner);
  const int other = owns ? message.peer : communicator_of(pages_).rank();
  int64_t at = 0;
  for (const size_t index : message.matrices) {
    const Range part = part_of(other, index);
    visit(message.buffer.narrow(0, at, part.numel()),
          owns ? in_whole(index, part) : in_page(index, part));
    at += part.numel();
  }
}

void MatrixExchange::depart(Way way, const char* what) {
  comm::Communicator& communicator = communicator_of(pages_);
  const int rank = communicator.rank();
  const int ranks = communicator.size();
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
        if (made.is_sent) {
          for_each_piece(made, way,
                         [](const at::Tensor& to, const at::Tensor& from) { to.copy_(from); });
          made.pending = communicator.send(made.buffer, made.peer, what);
        } else {
          made.pending = communicator.recv(made.buffer, made.peer, what);
        }
        under_way_.push_back(std::move(made));
      }
    }
  }
}

void MatrixExchange::arrive(Way way) {
  for (Message& message : under_way_) {
    message.pending.wait();
    if (!message.is_sent) {
      for_each_piece(message, way,
                     [](const at::Tensor& from, const at::Tensor& to) { to.copy_(from); });
    }
    message = {};
  }
  under_way_.clear();
}

}  // namespace zeropage::zero
