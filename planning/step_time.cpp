#include "planning/step_time.h"

#include <algorithm>

namespace zeropage::planning {
namespace {

constexpr double kBackwardPerForward = 2;
// The fused step reads value, gradient and two states, and writes three of them; the gradient was copied into its
// bucket before.
constexpr double kBytesOfAnUpdate = 9 * sizeof(float);

double time_of(double amount, double per_second) {
  return per_second > 0 ? amount / per_second : 0;
}

}  // namespace

double step_seconds(const StepWork& work, const MachineSpeeds& speeds, const StepThreads& threads) {
  const double cores_of_rank =
      static_cast<double>(std::max(1, speeds.cores)) / std::max(1, threads.ranks_of_host);
  const double used = threads.threads_of_rank > 0
                          ? std::min(cores_of_rank, static_cast<double>(threads.threads_of_rank))
                          : cores_of_rank;
  const double flops = (1 + kBackwardPerForward) * work.forward_flops + work.recomputed_flops;
  const double bytes = (1 + kBackwardPerForward) * work.forward_bytes + work.recomputed_bytes;
  const double computed =
      (time_of(flops, speeds.product_flops_per_second) +
       time_of(bytes, speeds.elementwise_bytes_per_second) +
       time_of(work.updated_elements * kBytesOfAnUpdate, speeds.memory_bytes_per_second)) /
      used;
  const double sent = time_of(work.sent_bytes, speeds.link.bytes_per_second) +
                      work.messages * speeds.link.latency_seconds;
  const double on_disk = time_of(work.disk_read_bytes, speeds.disk_read_bytes_per_second) +
                         time_of(work.disk_written_bytes, speeds.disk_write_bytes_per_second);
  return std::max(computed + sent, on_disk);
}

}  // namespace zeropage::planning
