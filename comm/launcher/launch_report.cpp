#include "comm/launcher/launch_report.h"

#include <sstream>

#include "comm/launcher/signal_relay.h"

namespace zeropage::comm::detail {

std::string failure_report(const FailedRank& failed, const RankOutput& output,
                           const LaunchOptions& options) {
  const std::string name = "rank " + std::to_string(failed.rank);
  std::ostringstream text;
  text << "zeropage: " << name << " (pid " << failed.pid << ") ";
  if (failed.end.signal != 0) {
    text << "was killed by " << signal_name(failed.end.signal);
    if (failed.end.core_dumped) text << " (core dumped)";
  } else {
    text << "exited with code " << failed.end.exit_code;
  }
  text << '\n';
  if (failed.end.signal == SIGKILL) {
    text << "zeropage: if nobody sent it, the machine was out of memory: dmesg tells\n";
  }
  if (output.left_out() > 0) {
    text << "zeropage: left out " << output.left_out()
         << " lines of LibTorch's stack; TORCH_SHOW_CPP_STACKTRACES=1 shows them\n";
  }
  if (failed.streams == RankStart::Streams::kInherited) {
    text << "zeropage: " << name << " wrote to our own output: its last lines are above\n";
  } else if (!output.tail().empty()) {
    text << "zeropage: last lines of " << name << ":\n";
    for (const std::string& line : output.tail()) text << "  | " << line << '\n';
  } else if (options.tail_lines > 0) {
    text << "zeropage: " << name << " printed nothing\n";
  }
  return text.str();
}

std::string name_ranks(const std::vector<int>& ranks) {
  constexpr std::size_t kNamed = 8;
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (std::size_t i = 0; i < ranks.size() && i < kNamed; ++i) {
    text += (i == 0 ? " " : ", ") + std::to_string(ranks[i]);
  }
  if (ranks.size() > kNamed) text += " and " + std::to_string(ranks.size() - kNamed) + " more";
  return text;
}

std::string name_duration(std::chrono::milliseconds time) {
  std::ostringstream text;
  text << static_cast<double>(time.count()) / 1000.0 << " s";
  return text.str();
}

}  // namespace zeropage::comm::detail
