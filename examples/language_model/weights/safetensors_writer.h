// One safetensors file, written tensor by tensor; it appears under its name when it is whole.
//
// Threads: one. Throws zeropage::state::StateError.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <torch/torch.h>
#include <zeropage/saved_state.h>

namespace language_model {

class SafetensorsWriter {
 public:
  struct Entry {
    std::string name;
    std::vector<int64_t> sizes;
    torch::ScalarType dtype = torch::kFloat32;  // or bf16, half or double
  };

  // A file that is there stays until finish().
  SafetensorsWriter(std::filesystem::path path, const std::vector<Entry>& entries);
  // Without finish() nothing stays.
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // values: of the entry's sizes; converted to its dtype.
  void write(const std::string& name, const torch::Tensor& values);
  // Every entry was written. Waits for the disk.
  void finish();

 private:
  struct Place {
    uint64_t begin = 0;
    torch::ScalarType dtype = torch::kFloat32;
    bool is_written = false;
  };

  const std::filesystem::path path_;
  const std::filesystem::path unfinished_;
  std::unique_ptr<zeropage::state::File> file_;
  std::map<std::string, Place> places_;
};

}  // namespace language_model
