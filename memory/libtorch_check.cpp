#include <cstdio>
#include <cstdlib>

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/version.h>

#include "memory/charged_block.h"
#include "memory/self_check.h"
#include "memory/storage.h"

namespace zeropage::memory {
namespace {

// Before the program's other initialisers: compiled with other headers, they may crash already.
__attribute__((constructor(101))) void end_with_another_libtorch() {
  const uint64_t loaded = aoti_torch_abi_version();
  if (loaded == TORCH_ABI_VERSION) return;
  const auto byte = [&](int place) { return static_cast<unsigned>(loaded >> (8 * place) & 0xFF); };
  std::fprintf(stderr,
               "zeropage: expected LibTorch %s, which this program was compiled with, got %u.%u.%u "
               "at run time; ldd tells where libtorch_cpu.so comes from: mend LD_LIBRARY_PATH, or "
               "compile the program and Zeropage with that release\n",
               TORCH_VERSION, byte(7), byte(6), byte(5));
  std::_Exit(EXIT_FAILURE);
}

void probe_libtorch() {
  const at::Tensor parameter = at::full({2, 2}, 2.0, at::kFloat).requires_grad_();
  const auto* const impl = parameter.unsafeGetTensorImpl();
  const auto is_ours = [](const c10::DataPtr& data) { return host_block_of(data) != nullptr; };
  expect_of_libtorch("tensors are on the ledger where the registered CPU allocator's blocks are",
                     is_ours(c10::GetCPUAllocator()->allocate(4)),
                     is_ours(parameter.storage().data_ptr()));
  const at::Tensor view = parameter.detach().view({-1});
  c10::StorageImpl& storage = *parameter.storage().unsafeGetStorageImpl();
  drop_memory(storage);
  expect_of_libtorch("the memory of a view whose storage gave its memory up",
                     static_cast<void*>(nullptr), view.data_ptr());
  expect_of_libtorch("the bytes of such a view", size_t{16}, view.nbytes());
  give_memory(storage, at::full({4}, 3.0, at::kFloat));
  expect_of_libtorch("the sum of a view whose storage was given other memory", 12.0F,
                     view.sum().item<float>());

  const auto version = parameter._version();
  adopt_storage(parameter, at::full({4}, 5.0, at::kDouble).storage(), at::kDouble);
  expect_of_libtorch("a parameter is the same object in another storage",
                     parameter.unsafeGetTensorImpl() == impl);
  expect_of_libtorch("in another storage a parameter is a leaf that requires a gradient",
                     parameter.is_leaf() && parameter.requires_grad());
  expect_of_libtorch("the version of a parameter in another storage", version,
                     parameter._version());
  expect_of_libtorch("the sum of a parameter in another storage", 20.0,
                     parameter.sum().item<double>());
}

}  // namespace

void check_libtorch() {
  static SelfCheck check("any training", "", &probe_libtorch);
  check.require();
}

}  // namespace zeropage::memory
