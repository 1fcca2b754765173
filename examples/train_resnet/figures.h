// What a run measured, and the table that compares runs.
#pragma once

#include <cstdint>
#include <string>

namespace train_resnet {

struct Figures {
  std::string way;  // "2 threads", "4 by Slurm"
  int stage = 0;
  int64_t steps = 0;
  double seconds_an_epoch = 0;  // of training alone, from the steps after the first two
  double images_a_second = 0;
  double loss = 0;         // of the last step, over all ranks
  int64_t peak_bytes = 0;  // by the ledger, of the rank that held most
  double accuracy = 0;     // in the end, over all test images
  std::string weights_sha256;
};

// Adds the run to the file, a JSON line each, and returns the table of all that are in it. Throws where the file cannot
// be read or written.
std::string added_to_table(const std::string& file, const Figures& figures);

// Throws where it cannot be written.
void write_json(const std::string& file, const Figures& figures);

}  // namespace train_resnet
