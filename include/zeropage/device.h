// Devices, their memory and their names.
#pragma once

#include <cstdint>
#include <string>

#include <c10/core/Device.h>

// The accelerators of this machine, as errors and agreements name them.
//
// Written over LibTorch's device-generic guards; what only CUDA knows comes from memory/cuda, or,
// in a build without it, from memory/no_cuda.cpp.
// Threads: any.

namespace zeropage::memory {

// How many this process sees; 0 where there are none, or none that work. 1 for the host. Starts the
// driver, as all of the following do unless they say otherwise: a process that asked cannot fork ranks
// (device/accelerator_driver.h).
int device_count(c10::DeviceType type);

// Whether this build has CUDA and this machine its driver. Leaves the driver alone.
bool has_cuda_driver();

// Why tensors cannot be made there, and what to do; "" if they can. device: with an index, unless it
// is the host.
std::string obstacle_to(c10::Device device);
// Throws it.
void check_device(c10::Device device);

// Processes that see the same name compute on the same device, on whichever host. This and what
// follows: REQUIRES a device without an obstacle.
std::string device_identity(c10::Device device);
// "NVIDIA H200"
std::string device_name(c10::Device device);

struct DeviceMemory {
  int64_t total_bytes = 0;
  int64_t free_bytes = 0;  // now, for all processes
  // What LibTorch's caching allocator of this process holds and nothing uses.
  int64_t cached_bytes = 0;
};
DeviceMemory device_memory(c10::Device device);

// Gives back to the device what LibTorch's caching allocator of this process holds and nothing uses, as far as it is
// whole segments. The host waits for the device. Does nothing on the host.
void release_cached_memory(c10::Device device);

// The calling thread's from here on: factories that are told "cuda" use it.
void set_current_device(c10::Device device);

// What matrix products keep of a device, for each thread that runs some: in training the one of forward and the one
// of backward. LibTorch's allocator hands it out, so it is on the ledgers too.
// Threads: any. Sizes in bytes.
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
