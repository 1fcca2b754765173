#include "tools/plan_command.h"

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <unistd.h>

namespace zeropage::tools {

PlanCommand::PlanCommand(CLI::App& zp) {
  parser_ = zp.add_subcommand(
      "plan", "Tell what a model will hold, send and compute, and the cheapest setting that fits");
  // zp-plan reads all of it, --help too.
  parser_->set_help_flag();
  parser_->prefix_command();
}

int PlanCommand::run(const std::vector<std::string>& after_dashes) const {
  const std::filesystem::path program =
      std::filesystem::read_symlink("/proc/self/exe").parent_path() / "zp-plan";
  std::vector<std::string> arguments = parser_->remaining();
  arguments.insert(arguments.begin(), program.string());
  arguments.insert(arguments.end(), after_dashes.begin(), after_dashes.end());
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  ::execv(program.c_str(), pointers.data());
  throw std::system_error(
      errno, std::generic_category(),
      "zp plan: " + program.string() + " cannot be started; build and install it beside zp");
}

}  // namespace zeropage::tools
