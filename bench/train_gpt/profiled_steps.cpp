#include "bench/train_gpt/profiled_steps.h"

#include <algorithm>
#include <charconv>

#include "bench/train_gpt/memory_formula.h"
#include "zeropage/check.h"
#include "zeropage/device.h"

namespace train_gpt {

using zeropage::profile::Profiler;

std::pair<int64_t, int64_t> ProfileFlags::range(int64_t steps_of_run) const {
  constexpr int64_t kUsual = 3;
  if (steps.empty()) return {std::max<int64_t>(0, steps_of_run - kUsual), steps_of_run - 1};
  int64_t first = 0, last = 0;
  const char* const end = steps.data() + steps.size();
  const auto of_first = std::from_chars(steps.data(), end, first);
  const bool has_dash = of_first.ec == std::errc() && of_first.ptr != end && *of_first.ptr == '-';
  const auto of_last = has_dash ? std::from_chars(of_first.ptr + 1, end, last) : of_first;
  ZP_CHECK(has_dash && of_last.ec == std::errc() && of_last.ptr == end, "--profile-steps ", steps,
           ": expected the first and the last step, such as 3-5");
  ZP_CHECK(first >= 1 && last >= first && last <= steps_of_run, "--profile-steps ", steps,
           ": expected steps from 1 to ", steps_of_run, " (--steps), the first before the last");
  return {first - 1, last - 1};
}

ProfiledSteps::ProfiledSteps(const zeropage::comm::World& world, const Flags& flags,
                             const Parameters& parameters)
    : flags_(flags) {
  if (!flags.profile.is_asked_for()) return;
  const auto [first, last] = flags.profile.range(flags.steps);
  profiler_.emplace(
      world, zeropage::profile::ProfilerOptions{
                 .first_step = first + 1,
                 .last_step = last + 1,
                 .title = c10::str("train_gpt at stage ", text_of(flags.options.stage), " on ",
                                   world.size(), world.size() == 1 ? " rank" : " ranks")});
  const int data_ranks = world.size() / flags.ranks_of_model();
  profiler_->set_formula(
      memory_formula(flags, parameters.of_rank, data_ranks)[zeropage::memory::Tier::kDevice]);
  profiler_->note("parameters", std::to_string(parameters.of_model));
  profiler_->note("blocks", c10::str(flags.model.layers, " of width ", flags.model.d_model));
  profiler_->note("batch", c10::str(flags.batch, " samples of ", flags.model.sequence,
                                    " tokens a rank and micro-step, ",
                                    flags.accumulator.micro_steps, " micro-steps"));
  profiler_->note("optimizer", flags.optimizer);
  profiler_->note("activations", flags.checkpointing.text +
                                     (flags.checkpointing.tiles_mlps ? ", MLPs in tiles" : ""));
  profiler_->note("device", zeropage::memory::device_name(world.device()));
}

std::optional<Profiler::Step> ProfiledSteps::step(int64_t number) {
  // Reports count as the progress of the run does.
  if (!profiler_) return std::nullopt;
  return profiler_->step(number + 1);
}

void ProfiledSteps::write() const {
  if (!profiler_) return;
  zeropage::profile::ProfileFiles files;
  const std::string& report = flags_.profile.report;
  (report.ends_with(".html") ? files.page : files.profile) = report;
  files.trace = flags_.profile.trace;
  profiler_->write(files);
}

}  // namespace train_gpt
