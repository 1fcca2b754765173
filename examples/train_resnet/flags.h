// The command line.
#pragma once

#include <cstdint>
#include <string>

namespace train_resnet {

struct Flags {
  std::string data = "datasets/fashion-mnist";
  int ranks = 1;
  bool as_threads = false;
  std::string device = "cpu";  // or "cuda"
  int threads = 0;             // of a rank; 0: the cores shared among local ranks
  int stage = 0;
  int64_t epochs = 5;
  int64_t steps = 0;    // the most steps; 0: all epochs
  int64_t batch = 256;  // of all ranks together
  int64_t width = 64;
  double learning_rate = 0.1;
  double momentum = 0.9;
  double weight_decay = 5e-4;
  uint64_t seed = 1;
  int loader_threads = 1;
  int64_t report_every = 10;
  bool by_rank = false;  // each rank's own figures, too
  bool sync_batch_norm = false;
  std::string table;  // file; "": none
  std::string json;   // file; "": none
  std::string save;   // folder; "": none
  int64_t save_every = 0;
  std::string resume;
  bool auto_resume = false;  // from what is in `save`
  int64_t pause_ms = 0;      // after each step
};

// Exits as CLI11 does where the command line makes no sense: 2.
Flags read_flags(int argc, char** argv);

}  // namespace train_resnet
