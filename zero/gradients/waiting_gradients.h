// Which gradients are with autograd still, not yet in their pages' buckets.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <vector>

namespace zeropage::zero {

class WaitingGradients {
 public:
  explicit WaitingGradients(size_t pages) : of_page_(pages) {}

  void add(size_t page, size_t parameter, int64_t numel) {
    pages_.insert(page);
    of_page_[page].parameters.push_back(parameter);
    of_page_[page].numel += numel;
    numel_ += numel;
  }
  void forget(size_t page) {
    numel_ -= of_page_[page].numel;
    of_page_[page] = {};
    pages_.erase(page);
  }

  const std::vector<size_t>& of(size_t page) const { return of_page_[page].parameters; }
  // Pages of which some wait, the last of the module first.
  std::vector<size_t> pages() const { return {pages_.begin(), pages_.end()}; }
  // Number of elements that wait, over all pages.
  int64_t numel() const { return numel_; }

 private:
  struct OfPage {
    std::vector<size_t> parameters;
    int64_t numel = 0;
  };
  std::vector<OfPage> of_page_;
  std::set<size_t, std::greater<>> pages_;
  int64_t numel_ = 0;
};

}  // namespace zeropage::zero
