// What the fake accelerator implements itself: allocation, views, copies, values for the host.
#pragma once

#include <torch/library.h>

namespace zeropage::testing {

void add_storage_kernels(torch::Library& aten);
void add_copy_kernels(torch::Library& aten);

// Gives a storage new memory of this size; what fits of the old values is copied.
void resize_fake_storage(const c10::Storage& storage, size_t bytes);

}  // namespace zeropage::testing
