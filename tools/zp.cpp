// zp: Zeropage's command line (tools/subcommand.h). Exit codes: those of the subcommand; 2 for a
// command line that makes no sense.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>

#include "comm/launcher/launch_fields.h"
#include "tools/plan_command.h"
#include "tools/report_command.h"
#include "tools/schedule_command.h"
#include "tools/state_command.h"
#include "tools/subcommand.h"
#include "tools/tokens_command.h"
#include "tools/topology_command.h"
#include "zeropage/launcher.h"

namespace {

constexpr int kUsageError = 2;

using zeropage::comm::LaunchOptions;
using zeropage::tools::Subcommand;

std::string dashed(const zeropage::memory::FieldText& field) {
  return "--" + std::string(field.flag.name);
}

// The parser does not know that what follows its options is a program.
class RunFormatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App* /*app*/, std::string /*name*/) const override {
    return "Usage: zp run -n N [OPTIONS] [--] PROGRAM [ARGUMENTS...]\n";
  }
};

class RunCommand : public Subcommand {
 public:
  explicit RunCommand(CLI::App& zp) {
    parser_ = zp.add_subcommand("run", "Run a program in several ranks on this machine");
    parser_->formatter(std::make_shared<RunFormatter>());
    parser_->footer(
        "Every rank gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT.\n"
        "When a rank fails the others are ended, and zp returns its exit code (128 + n for signal "
        "n).\n"
        "With --restarts it is started again, and programs that train in zeropage::survive() go on "
        "from the last copy of their state.\n"
        "Example: zp run -n 4 -- ./train_gpt --stage 1 --steps 100");
    using zeropage::memory::text_of_field;
    constexpr auto ranks = text_of_field<&LaunchOptions::ranks>();
    constexpr auto grace = text_of_field<&LaunchOptions::grace>();
    constexpr auto output = text_of_field<&LaunchOptions::output>();
    constexpr auto restarts = text_of_field<&LaunchOptions::restarts>();
    constexpr auto copies_in = text_of_field<&LaunchOptions::copies_in>();
    parser_->add_option("-n," + dashed(ranks), options_.ranks, std::string(ranks.help))
        ->required()
        ->type_name(std::string(ranks.flag.values));
    const auto whole_seconds = std::chrono::duration_cast<std::chrono::seconds>(options_.grace);
    parser_
        ->add_option(dashed(grace), grace_seconds_,
                     std::string(grace.help) + " [" + std::to_string(whole_seconds.count()) + "]")
        ->check(CLI::Range(0.0, 1e6))
        ->type_name(std::string(grace.flag.values));
    parser_->add_option(dashed(restarts), options_.restarts, std::string(restarts.help) + " [0]")
        ->type_name(std::string(restarts.flag.values));
    parser_
        ->add_option(dashed(copies_in), options_.copies_in,
                     std::string(copies_in.help) + " [" + options_.copies_in + "]")
        ->type_name(std::string(copies_in.flag.values));
    parser_->add_flag(dashed(output), bare_rank_zero_, std::string(output.flag.help));
    // Options behind the program's name are the program's.
    parser_->prefix_command();
  }

  bool chosen() const override { return parser_->parsed(); }

  int run(const std::vector<std::string>& after_dashes) const override {
    // Dashes in front of the program are ours, later ones its own.
    std::vector<std::string> program = parser_->remaining();
    const bool ours = program.empty() && !after_dashes.empty();
    program.insert(program.end(), after_dashes.begin() + (ours ? 1 : 0), after_dashes.end());
    if (program.empty()) throw std::invalid_argument("PROGRAM is required");
    if (program.front().starts_with('-')) {
      throw std::invalid_argument("unknown option " + program.front());
    }
    LaunchOptions options = options_;
    options.grace = std::chrono::milliseconds(static_cast<long>(grace_seconds_ * 1000.0));
    if (bare_rank_zero_) options.output = LaunchOptions::Output::kRankZeroBare;
    return zeropage::comm::launch_program(program, options);
  }

 private:
  CLI::App* parser_;
  LaunchOptions options_;
  double grace_seconds_ = std::chrono::duration<double>(options_.grace).count();
  bool bare_rank_zero_ = false;
};

int usage_error(std::string_view message) {
  const std::string line(message.substr(0, message.find('\n')));
  std::fprintf(stderr, "zp: %s; see zp --help, or --help behind the subcommand\n", line.c_str());
  return kUsageError;
}

int run_zp(int argc, char** argv) {
  CLI::App zp("Zeropage: virtual memory for training", "zp");
  zp.set_version_flag("--version", "zp " ZEROPAGE_VERSION);
  zp.require_subcommand(1);
  std::vector<std::unique_ptr<Subcommand>> subcommands;
  subcommands.push_back(std::make_unique<RunCommand>(zp));
  subcommands.push_back(std::make_unique<zeropage::tools::PlanCommand>(zp));
  subcommands.push_back(std::make_unique<zeropage::tools::ReportCommand>(zp));
  subcommands.push_back(std::make_unique<zeropage::tools::ScheduleCommand>(zp));
  subcommands.push_back(std::make_unique<zeropage::tools::TopologyCommand>(zp));
  subcommands.push_back(std::make_unique<zeropage::tools::StateCommand>(zp));
  subcommands.push_back(std::make_unique<zeropage::tools::TokensCommand>(zp));
  // The parser would hand what follows "--" to zp instead of the subcommand.
  const auto dashes = std::find(argv + std::min(argc, 1), argv + argc, std::string_view("--"));
  const std::vector<std::string> after_dashes(dashes, argv + argc);
  try {
    zp.parse(static_cast<int>(dashes - argv), argv);
  } catch (const CLI::ParseError& error) {
    return error.get_exit_code() == 0 ? zp.exit(error) : usage_error(error.what());
  }
  for (const auto& subcommand : subcommands) {
    if (subcommand->chosen()) return subcommand->run(after_dashes);
  }
  return kUsageError;
}

// A full disk is noticed when the last of the output is written.
int with_output_written(int exit_code) {
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return exit_code;
  std::fprintf(stderr, "zp: the output cannot be written: %s\n",
               errno != 0 ? std::strerror(errno) : "a write failed");
  return exit_code != 0 ? exit_code : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return with_output_written(run_zp(argc, argv));
  } catch (const std::invalid_argument& error) {
    return usage_error(error.what());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
