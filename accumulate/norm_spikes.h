// Notices gradient norms that stick out: how many standard deviations a norm lies above the mean of
// the last accepted ones.
//
//   if (!spikes.look(norm).skips()) optimizer.step();
//
// Only norms above the mean count; z = (norm - mean) / deviation over the window's norms, with the sample standard
// deviation. Spikes and norms that are not finite do not enter the window. More than most_in_a_row
// spikes in a row are no spikes but a new level: the norm is accepted, and the window starts anew
// with it. Where all norms in the window are 0 there is nothing to compare with, and none is a
// spike.
// Threads: one at a time. Ranks that see the same norms come to the same verdicts, bit for bit,
// also after save and load. Cost: 8 bytes a norm in the window, and two passes over it a step.
#pragma once

#include <cstdint>
#include <deque>

#include <torch/serialize/archive.h>

namespace zeropage::accumulate {

enum class OnSpike {
  kSkip,  // the verdict says so
  kStop,  // look() throws
};

struct NormSpikeOptions {
  // Accepted norms that are remembered; at least 2.
  int64_t window = 128;
  // Standard deviations above the mean past which a norm is a spike; above 0.
  double z_score = 6;
  // Norms in the window before it judges; from 2 to window.
  int64_t warm_up = 32;
  // The deviation counts as at least this share of the mean, so that in a window of nearly equal
  // norms not every change is a spike: no norm below mean * (1 + z_score * least_deviation) is one.
  // Above 0.
  double least_deviation = 0.05;
  OnSpike on_spike = OnSpike::kSkip;
  // Spikes in a row that are skipped before they count as a new level; at least 1. Without meaning
  // under kStop.
  int64_t most_in_a_row = 8;
};

// Throws c10::Error unless the options are in range.
void check_options(const NormSpikeOptions& options);

class NormSpikes {
 public:
  struct Verdict {
    enum Kind {
      kAccepted,
      kNewLevel,  // accepted too: one spike more than most_in_a_row
      kSpike,
      kNotFinite,
    };

    Kind kind = kAccepted;
    // Mean and deviation of the window before this norm; 0 if the norm was not judged.
    double mean = 0;
    double deviation = 0;
    double z_score = 0;

    bool skips() const { return kind == kSpike || kind == kNotFinite; }
  };

  explicit NormSpikes(const NormSpikeOptions& options = {});

  // Called once a step, with the norm over all ranks, before it is clipped. Throws c10::Error on a
  // negative norm and, under OnSpike::kStop, on a spike; then it leaves the window as it was.
  Verdict look(double norm);

  const NormSpikeOptions& options() const { return options_; }
  // Over all steps, and since the last accepted norm.
  int64_t spikes() const { return spikes_; }
  int64_t spikes_in_a_row() const { return spikes_in_a_row_; }

  // The window and counters, without the options: torch::save(spikes, path), torch::load(spikes,
  // path). A state that is damaged or longer than the window is refused, and nothing changes.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  Verdict judge(double norm) const;
  void accept(double norm);

  NormSpikeOptions options_;
  std::deque<double> norms_;  // oldest first
  int64_t spikes_ = 0;
  int64_t spikes_in_a_row_ = 0;
};

torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                            const NormSpikes& spikes);
torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                           NormSpikes& spikes);

}  // namespace zeropage::accumulate
