// Pages in memory, for tests of the pager and the trap: no ranks, no collectives. What comes and
// goes is logged, and may be late or fail.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/record_function.h>
#include <torch/torch.h>

#include "paging/pager.h"
#include "paging/trap.h"
#include "zeropage/ledger.h"

namespace zeropage::testing {

// What a FakePageSource serves, and what happened.
// Threads: set and read while no operator runs; the functions are called under the pager's mutex,
// on_arrival on a thread of its own.
struct FakePages {
  std::vector<at::Tensor> values;             // by page: [numel]
  std::vector<size_t> fetched;                // pages, in the order in which their fetches began
  std::vector<size_t> written_back;           // pages, in order
  std::function<void(size_t)> on_start;       // before a fetch begins; may throw
  std::function<void(size_t)> on_write_back;  // before it; may throw
  std::function<void(size_t)> on_arrival;     // while it is in flight; may throw. Unset: never is
};

class FakePageSource final : public paging::PageSource {
 public:
  explicit FakePageSource(std::shared_ptr<FakePages> pages) : pages_(std::move(pages)) {}

  paging::Fetch start_fetch(size_t page) override {
    // Callbacks of a test (EvictBeforeEveryOperator) must not enter the pager from here.
    const at::DisableRecordFunctionGuard no_callbacks;
    if (pages_->on_start) pages_->on_start(page);
    pages_->fetched.push_back(page);
    const at::Tensor values = pages_->values[page];
    at::Tensor buffer;
    {
      const memory::KindScope kind(memory::Kind::kParameter);
      buffer = at::empty_like(values);
    }
    const auto copy = [buffer, values] {
      if (values.nbytes() == 0) return;
      std::memcpy(buffer.mutable_data_ptr(), values.const_data_ptr(), values.nbytes());
    };
    if (!pages_->on_arrival) {
      copy();
      return {buffer, {}};
    }
    std::shared_future<void> done =
        std::async(std::launch::async, [page, copy, on_arrival = pages_->on_arrival] {
          on_arrival(page);
          copy();
        });
    return {buffer, memory::Pending(std::move(done), {buffer})};
  }

  void write_back(size_t page, const at::Tensor& buffer) override {
    const at::DisableRecordFunctionGuard no_callbacks;
    if (pages_->on_write_back) pages_->on_write_back(page);
    pages_->written_back.push_back(page);
    pages_->values[page].copy_(buffer);
  }

 private:
  const std::shared_ptr<FakePages> pages_;
};

// A pager over a FakePageSource. Trapped tensors may outlive it.
class FakePaging {
 public:
  explicit FakePaging(paging::PagerOptions options = {})
      : pager(paging::Pager::make(std::make_unique<FakePageSource>(pages), std::move(options))) {}

  // Gives the tensor's storage a page of its own and evicts it.
  size_t add(const std::string& name, const at::Tensor& tensor) {
    return add_storages(name, {{tensor}});
  }

  // A page of several storages, one behind the other; each may belong to several tensors.
  size_t add_storages(const std::string& name,
                      const std::vector<std::vector<at::Tensor>>& storages) {
    std::vector<at::Tensor> flats;
    std::vector<paging::Page::StorageInPage> page_storages;
    int64_t bytes = 0;
    for (const auto& sharing : storages) {
      for (const at::Tensor& tensor : sharing) paging::set_trap(tensor);
      const c10::Storage& storage = sharing.front().storage();
      const auto dtype = sharing.front().scalar_type();
      const auto numel = static_cast<int64_t>(storage.nbytes() / c10::elementSize(dtype));
      flats.push_back(at::empty({numel}, dtype));
      if (numel > 0) {
        std::memcpy(flats.back().mutable_data_ptr(), storage.data(), storage.nbytes());
      }
      page_storages.push_back({storage, bytes});
      bytes += static_cast<int64_t>(storage.nbytes());
    }
    pages->values.push_back(at::cat(flats));
    return pager->add_page(name, bytes, std::move(page_storages));
  }

  // A page for each storage of the module's parameters, in their order.
  template <typename Module>
  void add_parameters(const Module& module) {
    std::vector<std::pair<std::string, std::vector<at::Tensor>>> by_storage;
    for (const auto& named : module->named_parameters()) {
      const auto known = std::find_if(by_storage.begin(), by_storage.end(), [&](const auto& one) {
        return one.second.front().is_alias_of(named.value());
      });
      if (known == by_storage.end()) {
        by_storage.push_back({named.key(), {named.value()}});
      } else {
        known->second.push_back(named.value());
      }
    }
    for (const auto& [name, sharing] : by_storage) add_storages(name, {sharing});
  }

  int64_t faults() const { return pager->statistics().faults; }

  const std::shared_ptr<FakePages> pages = std::make_shared<FakePages>();
  std::shared_ptr<paging::Pager> pager;
};

// The worst pager: while it lives, before every operator of this thread (those inside of operators,
// of backward and of optimizers too), all that is not in use goes.
class EvictBeforeEveryOperator {
 public:
  explicit EvictBeforeEveryOperator(const std::shared_ptr<paging::Pager>& pager) {
    pager_ = pager.get();
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction&) {
          pager_->release_unpinned();
          return std::unique_ptr<at::ObserverContext>();
        }).scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  }
  ~EvictBeforeEveryOperator() { at::removeCallback(handle_); }
  EvictBeforeEveryOperator(const EvictBeforeEveryOperator&) = delete;
  EvictBeforeEveryOperator& operator=(const EvictBeforeEveryOperator&) = delete;

 private:
  static inline thread_local paging::Pager* pager_ = nullptr;
  at::CallbackHandle handle_;
};

}  // namespace zeropage::testing
