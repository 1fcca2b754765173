#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "accumulate/detail/archive_values.h"
#include "zeropage/accumulator.h"
#include "zeropage/check.h"

namespace zeropage::accumulate {

void check_options(const NormSpikeOptions& options) {
  ZP_CHECK(options.window >= 2, "NormSpikes: window: expected 2 norms or more, got ",
           options.window);
  ZP_CHECK(options.z_score > 0 && std::isfinite(options.z_score),
           "NormSpikes: z_score: expected a finite number above 0, got ", options.z_score);
  ZP_CHECK(options.warm_up >= 2 && options.warm_up <= options.window,
           "NormSpikes: warm_up: expected from 2 norms to the window's ", options.window, ", got ",
           options.warm_up);
  ZP_CHECK(options.least_deviation > 0 && std::isfinite(options.least_deviation),
           "NormSpikes: least_deviation: expected a finite share of the mean above 0, got ",
           options.least_deviation);
  ZP_CHECK(options.most_in_a_row >= 1, "NormSpikes: most_in_a_row: expected 1 or more, got ",
           options.most_in_a_row);
}

NormSpikes::NormSpikes(const NormSpikeOptions& options) : options_(options) {
  check_options(options);
}

NormSpikes::Verdict NormSpikes::look(double norm) {
  ZP_CHECK(!(norm < 0), "NormSpikes: expected a gradient norm of 0 or more, got ", norm);
  Verdict verdict = judge(norm);
  if (verdict.kind == Verdict::kSpike) {
    ZP_CHECK(options_.on_spike == OnSpike::kSkip, "NormSpikes: the gradient norm ", norm, " is ",
             verdict.z_score, " standard deviations above the mean of the last ", norms_.size(),
             " norms (mean ", verdict.mean, ", deviation ", verdict.deviation,
             "), expected at most ", options_.z_score,
             "; look at this step's batch, lower the learning rate, or go on with OnSpike::kSkip");
    ++spikes_;
    if (++spikes_in_a_row_ <= options_.most_in_a_row) return verdict;
    verdict.kind = Verdict::kNewLevel;
    norms_.clear();
  }
  if (verdict.kind != Verdict::kNotFinite) accept(norm);
  return verdict;
}

NormSpikes::Verdict NormSpikes::judge(double norm) const {
  if (!std::isfinite(norm)) return {.kind = Verdict::kNotFinite};
  const auto count = static_cast<double>(norms_.size());
  if (norms_.size() < static_cast<size_t>(options_.warm_up)) return {};
  // Anew each time, oldest first: running sums would drift, and differ after a restart.
  const double mean = std::accumulate(norms_.begin(), norms_.end(), 0.0) / count;
  const double squares =
      std::accumulate(norms_.begin(), norms_.end(), 0.0,
                      [&](double sum, double seen) { return sum + (seen - mean) * (seen - mean); });
  const double deviation =
      std::max(std::sqrt(squares / (count - 1)), options_.least_deviation * mean);
  const double z_score = deviation > 0 ? (norm - mean) / deviation : 0;
  return {.kind = z_score > options_.z_score ? Verdict::kSpike : Verdict::kAccepted,
          .mean = mean,
          .deviation = deviation,
          .z_score = z_score};
}

void NormSpikes::accept(double norm) {
  spikes_in_a_row_ = 0;
  norms_.push_back(norm);
  if (norms_.size() > static_cast<size_t>(options_.window)) norms_.pop_front();
}

void NormSpikes::save(torch::serialize::OutputArchive& archive) const {
  archive.write("norms", c10::IValue(std::vector<double>(norms_.begin(), norms_.end())));
  archive.write("spikes", c10::IValue(spikes_));
  archive.write("spikes_in_a_row", c10::IValue(spikes_in_a_row_));
}

void NormSpikes::load(torch::serialize::InputArchive& archive) {
  const std::string owner = "NormSpikes";
  const std::vector<double> norms = detail::read_doubles(archive, owner, "norms");
  const int64_t spikes = detail::read_count(archive, owner, "spikes");
  const int64_t spikes_in_a_row = detail::read_count(archive, owner, "spikes_in_a_row");
  ZP_CHECK(norms.size() <= static_cast<size_t>(options_.window), "NormSpikes: the archive has ",
           norms.size(), " norms, more than this window's ", options_.window,
           "; load it into one made with a window of at least ", norms.size());
  for (const double norm : norms) {
    ZP_CHECK(std::isfinite(norm) && norm >= 0,
             "NormSpikes: \"norms\" in the archive: expected finite norms of 0 or more, got ", norm,
             "; it is damaged, take another one");
  }
  ZP_CHECK(spikes_in_a_row <= spikes, "NormSpikes: the archive has more spikes in a row (",
           spikes_in_a_row, ") than spikes (", spikes, "); it is damaged, take another one");
  norms_.assign(norms.begin(), norms.end());
  spikes_ = spikes;
  spikes_in_a_row_ = spikes_in_a_row;
}

torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                            const NormSpikes& spikes) {
  spikes.save(archive);
  return archive;
}

torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                           NormSpikes& spikes) {
  spikes.load(archive);
  return archive;
}

}  // namespace zeropage::accumulate
