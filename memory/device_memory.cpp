#include "memory/device_memory.h"

#include <memory>
#include <mutex>
#include <sstream>
#include <unordered_map>

#include "memory/charged_block.h"
#include "memory/meta_memory.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"
#include "zeropage/ledger.h"

namespace zeropage::memory {
namespace {

struct NotedBlock {
  NotedBlock(int64_t bytes, c10::DeviceType on_device)
      : charge(bytes, on_device), device(on_device) {}
  ChargedBlock charge;
  const c10::DeviceType device;
};

// Never destroyed: blocks are freed during static destruction too.
struct Table {
  std::mutex mutex;
  // Guarded by mutex.
  std::unordered_map<const void*, std::unique_ptr<NotedBlock>> blocks;
};

Table& table() {
  static auto* const instance = new Table;
  return *instance;
}

}  // namespace

void note_device_block(const void* data, int64_t bytes, c10::DeviceType device) {
  auto block = std::make_unique<NotedBlock>(bytes, device);
  const std::lock_guard lock(table().mutex);
  table().blocks[data] = std::move(block);
}

void forget_device_block(const void* data) {
  std::unique_ptr<NotedBlock> forgotten;
  const std::lock_guard lock(table().mutex);
  const auto known = table().blocks.find(data);
  if (known == table().blocks.end()) return;
  forgotten = std::move(known->second);
  table().blocks.erase(known);
}

int64_t device_allocated_bytes(c10::DeviceType device) {
  const std::lock_guard lock(table().mutex);
  int64_t bytes = 0;
  for (const auto& [data, block] : table().blocks) {
    if (block->device == device) bytes += block->charge.bytes();
  }
  return bytes;
}

std::string out_of_memory_report(const DeviceShortage& shortage) {
  const std::string what = c10::str(
      "out of ", c10::DeviceTypeName(shortage.device, /*lower_case=*/true),
      " memory: ", describe_request(current_kind(), shortage.asked_bytes), " asked for, ",
      format_bytes(shortage.free_bytes), " free on the device",
      shortage.cached_bytes == 0
          ? std::string()
          : c10::str(", ", format_bytes(shortage.cached_bytes), " unused in pieces of the cache"));
  return c10::str(shortage_report(*Ledger::current(), what,
                                  {.device = shortage.device,
                                   .kind = current_kind(),
                                   .asked_bytes = shortage.asked_bytes,
                                   .missing_bytes = shortage.asked_bytes}),
                  shortage.advice.empty() ? "" : shortage.advice + "\n");
}

void throw_out_of_memory(const DeviceShortage& shortage) {
  C10_THROW_ERROR(OutOfMemoryError, out_of_memory_report(shortage));
}

bool assign(const at::Tensor& tensor, Kind kind) {
  const c10::DataPtr& data = tensor.storage().data_ptr();
  if (ChargedBlock* block = meta_block_of(data)) {
    block->take_over(kind);
    return true;
  }
  if (data.get() == nullptr) return false;
  if (ChargedBlock* block = host_block_of(data)) {
    block->take_over(kind);
    return true;
  }
  const std::lock_guard lock(table().mutex);
  const auto known = table().blocks.find(data.get());
  if (known == table().blocks.end()) return false;
  known->second->charge.take_over(kind);
  return true;
}

}  // namespace zeropage::memory
