#include "optim/bit_hashes.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include "base/block_checksum.h"
#include "optim/cuda/bit_hashes.h"
#include "optim/cuda/current_stream.h"
#include "optim/parallel.h"

namespace zeropage::optim {
namespace {

// What a thread takes at once, so that threads have equal parts of one large tensor and of many small ones.
constexpr int64_t kHashedAtOnce = 1 << 20;

struct HostPiece {
  const std::byte* data;
  int64_t bytes;
};

// A tensor of several pieces has the hash of their hashes.
std::vector<uint64_t> hashes_on_host(const std::vector<at::Tensor>& flat) {
  std::vector<HostPiece> pieces;
  std::vector<size_t> ends;  // by tensor
  for (const at::Tensor& tensor : flat) {
    const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    for (int64_t at = 0; at < std::max<int64_t>(bytes, 1); at += kHashedAtOnce) {
      pieces.push_back({data + at, std::min(kHashedAtOnce, bytes - at)});
    }
    ends.push_back(pieces.size());
  }
  std::vector<uint64_t> of_pieces(pieces.size());
  parallel_for(static_cast<int64_t>(pieces.size()), 1, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      of_pieces[i] = base::block_checksum(pieces[i].data, pieces[i].bytes);
    }
  });
  std::vector<uint64_t> hashes;
  size_t begin = 0;
  for (const size_t end : ends) {
    const auto* const first = reinterpret_cast<const std::byte*>(&of_pieces[begin]);
    const auto bytes = static_cast<int64_t>((end - begin) * sizeof(uint64_t));
    hashes.push_back(end - begin == 1 ? of_pieces[begin] : base::block_checksum(first, bytes));
    begin = end;
  }
  return hashes;
}

std::vector<uint64_t> numbers_of(const at::Tensor& longs) {
  const at::Tensor here = longs.cpu();
  const auto* const numbers = here.const_data_ptr<int64_t>();
  return {numbers, numbers + here.numel()};
}

std::vector<uint64_t> hashes_on_cuda(const std::vector<at::Tensor>& flat) {
  std::vector<HashedPiece> pieces;
  int64_t tiles = 0;
  for (const at::Tensor& tensor : flat) {
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    pieces.push_back({tensor.const_data_ptr(), bytes, tiles});
    tiles += hashed_tiles(bytes);
  }
  const auto count = static_cast<int64_t>(pieces.size());
  const at::Device device = flat.front().device();
  const c10::DeviceGuard guard(device);
  const auto table_bytes = static_cast<int64_t>(pieces.size() * sizeof(HashedPiece));
  const at::Tensor table = at::empty({table_bytes}, at::kByte);
  std::memcpy(table.mutable_data_ptr(), pieces.data(), static_cast<size_t>(table_bytes));
  const at::Tensor there = table.to(device);
  const at::Tensor hashes = at::zeros({count}, at::TensorOptions(at::kLong).device(device));
  optim::cuda::bit_hashes(static_cast<const HashedPiece*>(there.const_data_ptr()), count, tiles,
                          reinterpret_cast<uint64_t*>(hashes.mutable_data_ptr<int64_t>()),
                          optim::cuda::current_stream(device));
  return numbers_of(hashes);
}

at::ScalarType whole_numbers_of(int64_t element_bytes) {
  switch (element_bytes) {
    case 8:
      return at::kLong;
    case 4:
      return at::kInt;
    case 2:
      return at::kShort;
    default:
      return at::kByte;
  }
}

std::vector<uint64_t> sums_by_operators(const std::vector<at::Tensor>& flat) {
  std::vector<at::Tensor> sums;
  for (const at::Tensor& tensor : flat) {
    sums.push_back(tensor.view(whole_numbers_of(tensor.element_size())).sum(at::kLong));
  }
  return numbers_of(at::stack(sums));
}

std::vector<uint64_t> hashes_on_accelerator(const std::vector<at::Tensor>& flat) {
  return flat.front().is_cuda() ? hashes_on_cuda(flat) : sums_by_operators(flat);
}

}  // namespace

std::vector<uint64_t> bit_hashes(const std::vector<at::Tensor>& flat) {
  std::vector<at::Tensor> here, there;
  for (const at::Tensor& tensor : flat) (tensor.is_cpu() ? here : there).push_back(tensor);
  const std::vector<uint64_t> of_here = hashes_on_host(here);
  if (there.empty()) return of_here;
  const std::vector<uint64_t> of_there = hashes_on_accelerator(there);
  std::vector<uint64_t> hashes;
  auto next_here = of_here.begin(), next_there = of_there.begin();
  for (const at::Tensor& tensor : flat) {
    hashes.push_back(tensor.is_cpu() ? *next_here++ : *next_there++);
  }
  return hashes;
}

}  // namespace zeropage::optim
