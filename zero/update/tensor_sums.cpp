#include "zero/update/tensor_sums.h"

#include <algorithm>
#include <span>
#include <utility>

#include <ATen/ops/zeros.h>

#include "zeropage/communicator.h"

namespace zeropage::zero {
namespace {

constexpr auto kWords = static_cast<int64_t>(optim::ExactSum::kWords);
constexpr int64_t kWordsOfParameter = 2 * kWords;

// visit(sum, its words), with words of [kWordsOfParameter] for each of the parameters. sums: by parameter.
template <typename All, typename Visit>
void for_each_sum(All& sums, const std::vector<size_t>& parameters, const at::Tensor& words,
                  const Visit& visit) {
  using Sums = TensorSums::Sums;
  int64_t* at = words.mutable_data_ptr<int64_t>();
  for (const size_t index : parameters) {
    for (auto Sums::*const which : {&Sums::values, &Sums::directions}) {
      visit(sums[index].*which, at);
      at += kWords;
    }
  }
}

}  // namespace

TensorSums::OfPage TensorSums::of_page(size_t page, const std::vector<size_t>& with_sums,
                                       const c10::Device& device) const {
  const Range owned = pages_.owned(page);
  OfPage of_page;
  std::vector<optim::NormPart> parts;
  for (const size_t index : with_sums) {
    const Range range = intersection(owned, pages_.parameters()[index].range);
    if (range.empty()) continue;
    const auto number = static_cast<int64_t>(parts.size());
    parts.push_back({.begin = range.begin - owned.begin,
                     .numel = range.numel(),
                     .sum = number,
                     .flag = number});
    of_page.parameters.push_back(index);
  }
  const auto count = static_cast<int64_t>(parts.size());
  if (count > 0 && !device.is_meta()) {
    of_page.table.emplace(std::move(parts), optim::NormSizes{.sums = count, .flags = count},
                          device);
  }
  return of_page;
}

void TensorSums::add_squares(const OfPage& of_page, const at::Tensor& flat,
                             optim::ExactSum Sums::*to) {
  if (!of_page.table) return;
  const optim::NormSizes& sizes = of_page.table->sizes();
  const at::Tensor words = sizes.make_words(flat.device());
  of_page.table->add_squares(flat, words);
  const at::Tensor on_host = words.cpu();
  for (size_t sum = 0; sum < of_page.parameters.size(); ++sum) {
    sums_[of_page.parameters[sum]].*to =
        sizes.sum(on_host.const_data_ptr<int64_t>(), static_cast<int64_t>(sum));
  }
}

// Parameters that are one rank's need no message.
TensorSums::UnderWay TensorSums::start(std::vector<size_t> parameters) const {
  const comm::World& world = pages_.shards();
  const bool are_whole = world.size() == 1 || pages_.plan().ownership() == Ownership::kWholePage;
  if (are_whole || parameters.empty()) return {};
  const at::Tensor words =
      at::zeros({kWordsOfParameter * static_cast<int64_t>(parameters.size())}, at::kLong);
  for_each_sum(sums_, parameters, words,
               [](const optim::ExactSum& sum, int64_t* to) { std::ranges::copy(sum.words(), to); });
  comm::Communicator& communicator = world.communicator();
  UnderWay under_way{.parameters = std::move(parameters), .words = words.to(communicator.device())};
  under_way.pending =
      communicator.all_reduce(under_way.words, comm::ReduceOp::kSum, "sums over tensors");
  return under_way;
}

void TensorSums::take(const UnderWay& under_way) {
  if (under_way.parameters.empty()) return;
  under_way.pending.wait();
  if (under_way.words.is_meta()) return;
  for_each_sum(sums_, under_way.parameters, under_way.words.cpu(),
               [](optim::ExactSum& sum, const int64_t* from) {
                 sum = optim::ExactSum::from_words(std::span<const int64_t, kWords>(from, kWords));
               });
}

}  // namespace zeropage::zero
