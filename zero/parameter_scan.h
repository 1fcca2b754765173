// Looks at all parameters of a model on several threads. Each has its tensors elsewhere in memory, so that a look at 10,000 is
// mostly waiting for memory, and threads wait at the same time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include <c10/core/TensorImpl.h>

#include "optim/parallel.h"

namespace zeropage::zero {

// Fewer are seen by one thread: it takes as long as starting another.
inline constexpr int64_t kParametersOfThread = 512;

// Calls visit(i) for each i in [0, count), on any thread.
template <typename Visit>
void for_each_in_parallel(size_t count, const Visit& visit) {
  optim::parallel_for(static_cast<int64_t>(count), kParametersOfThread,
                      [&](int64_t begin, int64_t end) {
                        for (int64_t i = begin; i < end; ++i) visit(static_cast<size_t>(i));
                      });
}

// So many parameters ahead of its own a look asks for what it will read: longer than memory takes.
inline constexpr size_t kParametersAhead = 16;

// Asks for what ahead(i + kParametersAhead) points to, where a scan of [0, count) is at i. What a pointer leads to has to be
// known without reading it.
template <typename Ahead>
void look_ahead(size_t i, size_t count, const Ahead& ahead) {
  if (i + kParametersAhead < count) __builtin_prefetch(ahead(i + kParametersAhead));
}

// Calls ask(i + hops * kParametersAhead), where a scan of [0, count) is at i. What is so many pointers away is asked for in as
// many calls: one with more hops asks for a pointer, and one with fewer, which runs later, for what it points to.
template <typename Ask>
void ask_ahead(size_t i, size_t count, size_t hops, const Ask& ask) {
  if (i + hops * kParametersAhead < count) ask(i + hops * kParametersAhead);
}

// Asks for all of a tensor's description, which takes several lines of the cache.
inline void ask_for(const c10::TensorImpl* tensor) {
  constexpr size_t kLineBytes = 64;
  for (size_t at = 0; at < sizeof(c10::TensorImpl); at += kLineBytes) {
    __builtin_prefetch(reinterpret_cast<const char*>(tensor) + at);
  }
}

// The least i in [0, count) for which holds(i), which is called on any thread; count where there is none.
template <typename Holds>
size_t first_in_parallel(size_t count, const Holds& holds) {
  std::atomic<size_t> first = count;
  for_each_in_parallel(count, [&](size_t i) {
    if (i >= first.load(std::memory_order_relaxed) || !holds(i)) return;
    size_t known = first.load();
    while (i < known && !first.compare_exchange_weak(known, i)) {
    }
  });
  return first;
}

}  // namespace zeropage::zero
