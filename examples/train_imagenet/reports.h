// What a run tells of its training and its validations: lines for people, and metrics.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "train_imagenet/out_folder.h"
#include "train_imagenet/score.h"

namespace train_imagenet {

// Where a run is.
struct Place {
  int64_t step = 0;        // steps made
  int64_t epoch = 0;       // from 0
  int64_t epochs = 0;      // of the whole run
  int64_t in_epoch = 0;    // steps of the epoch
  int64_t of_epoch = 0;    // all its steps
  int64_t steps_here = 0;  // steps that this process made
  int64_t steps_left = 0;  // of the whole run
  double epochs_made() const {
    return static_cast<double>(epoch) +
           static_cast<double>(in_epoch) / static_cast<double>(of_epoch);
  }
};

class Reports {
 public:
  // out outlives it.
  explicit Reports(OutFolder& out) : out_(out) {}

  // The samples since the last line. A pause, such as a validation, is no time of training: begin anew behind it.
  Score& since_last() { return since_last_; }
  void begin();
  // Collective.
  void training(const zeropage::World& world, const Place& place, double learning_rate);
  // of: "validation", or "average" for the average's weights. keeps: adds it to the metrics.
  void validation(const std::string& of, const Place& place, const Score& score, bool keeps);

 private:
  OutFolder& out_;
  Score since_last_;
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  // Pauses count for the time that is left, since there will be others.
  const std::chrono::steady_clock::time_point started_ = began_;
};

}  // namespace train_imagenet
