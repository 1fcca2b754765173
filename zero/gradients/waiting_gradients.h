// Which gradients are with autograd still, not yet in their pages' buckets.
#pragma once

#include <cstdint>
#include <vector>

namespace zeropage {

class WaitingGradients {
 public:
  explicit WaitingGradients(size_t pages) : of_page_(pages) {}

  void add(size_t page, size_t parameter, int64_t numel) {
    of_page_[page].parameters.push_back(parameter);
    of_page_[page].numel += numel;
    numel_ += numel;
  }
  void forget(size_t page) {
    numel_ -= of_page_[page].numel;
    of_page_[page] = {};
  }

  const std::vector<size_t>& of(size_t page) const { return of_page_[page].parameters; }
  // Of all pages.
  int64_t numel() const { return numel_; }

 private:
  struct OfPage {
    std::vector<size_t> parameters;
    int64_t numel = 0;
  };
  std::vector<OfPage> of_page_;
  int64_t numel_ = 0;
};

}  // namespace zeropage
