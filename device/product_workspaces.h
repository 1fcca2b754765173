// What matrix products keep of a device, for each thread that runs some: in training the one of forward and the one
// of backward. LibTorch's allocator hands it out, so it is on the ledgers too.
// Threads: any. Sizes in bytes.
#pragma once

#include <cstdint>

#include <c10/core/Device.h>

namespace zeropage::memory {

struct ProductWorkspaces {
  int64_t of_products = 0;         // cuBLAS's: 32 MiB on sm_90, 8.1 MiB on other devices
  int64_t of_biased_products = 0;  // cuBLASLt's: 1 MiB
};

inline constexpr ProductWorkspaces kWorkspacesOfSm90 = {.of_products = int64_t{32} << 20,
                                                        .of_biased_products = int64_t{1} << 20};

// On a CUDA device as LibTorch is told to have them (CUBLAS_WORKSPACE_CONFIG, CUBLASLT_WORKSPACE_SIZE). Of other
// devices nobody knows, which is none.
ProductWorkspaces product_workspaces(c10::Device device);

}  // namespace zeropage::memory
