#include "tests/fuzz/counted_allocations.h"

#include <algorithm>
#include <cstdlib>
#include <malloc.h>
#include <new>

namespace zeropage::testing {
namespace {

thread_local int64_t live_bytes = 0;
thread_local int64_t most_bytes = 0;

void* allocate(size_t bytes) noexcept {
  void* const memory = std::malloc(std::max<size_t>(bytes, 1));
  if (memory == nullptr) return nullptr;
  live_bytes += static_cast<int64_t>(::malloc_usable_size(memory));
  most_bytes = std::max(most_bytes, live_bytes);
  return memory;
}

void* allocate_or_throw(size_t bytes) {
  void* const memory = allocate(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void release(void* memory) noexcept {
  if (memory == nullptr) return;
  live_bytes -= static_cast<int64_t>(::malloc_usable_size(memory));
  std::free(memory);
}

}  // namespace

int64_t live_allocated_bytes() {
  return live_bytes;
}
void reset_most_allocated_bytes() {
  most_bytes = live_bytes;
}
int64_t most_allocated_bytes() {
  return most_bytes;
}

}  // namespace zeropage::testing

// All forms: a sanitizer brings each by itself, and would find memory that one of its own took given back
// by another's.
void* operator new(size_t bytes) {
  return zeropage::testing::allocate_or_throw(bytes);
}
void* operator new[](size_t bytes) {
  return zeropage::testing::allocate_or_throw(bytes);
}
void* operator new(size_t bytes, const std::nothrow_t& /*no*/) noexcept {
  return zeropage::testing::allocate(bytes);
}
void* operator new[](size_t bytes, const std::nothrow_t& /*no*/) noexcept {
  return zeropage::testing::allocate(bytes);
}
void operator delete(void* memory) noexcept {
  zeropage::testing::release(memory);
}
void operator delete[](void* memory) noexcept {
  zeropage::testing::release(memory);
}
void operator delete(void* memory, size_t /*bytes*/) noexcept {
  zeropage::testing::release(memory);
}
void operator delete[](void* memory, size_t /*bytes*/) noexcept {
  zeropage::testing::release(memory);
}
void operator delete(void* memory, const std::nothrow_t& /*no*/) noexcept {
  zeropage::testing::release(memory);
}
void operator delete[](void* memory, const std::nothrow_t& /*no*/) noexcept {
  zeropage::testing::release(memory);
}
