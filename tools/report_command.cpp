#include "tools/report_command.h"

#include <cstdio>
#include <optional>
#include <stdexcept>

#include "profile/report/profile_file.h"
#include "profile/report/terminal.h"
#include "zeropage/profile.h"

namespace zeropage::tools {

ReportCommand::ReportCommand(CLI::App& zp) {
  parser_ = zp.add_subcommand("report", "Show a memory profile: a page, a trace, or the terminal");
  parser_->add_option("file", file_, "A profile, as train_gpt --report FILE.json writes it")
      ->required()
      ->type_name("FILE.json");
  parser_->add_option("other", other_, "A second profile to compare with")->type_name("OTHER.json");
  parser_
      ->add_option("-o,--output", outputs_,
                   "Write NAME.html, a page that needs no network; or NAME.trace.json, for "
                   "ui.perfetto.dev; may be given more than once [the terminal]")
      ->type_name("NAME");
}

int ReportCommand::run(const std::vector<std::string>& after_dashes) const {
  if (!after_dashes.empty()) throw std::invalid_argument("zp report takes nothing behind --");
  try {
    std::vector<profile::ProfileFiles> files;
    for (const std::string& output : outputs_) {
      files.push_back(profile::ProfileFiles::by_name(output));
    }
    const profile::Profile profile = profile::read_profile(file_);
    std::optional<profile::Profile> other;
    if (!other_.empty()) other = profile::read_profile(other_);
    const profile::Profile* const against = other ? &*other : nullptr;
    if (outputs_.empty()) {
      std::fputs(profile::terminal_report(profile, against).c_str(), stdout);
    }
    for (const profile::ProfileFiles& file : files) profile::write_files(profile, file, against);
    return 0;
  } catch (const profile::ProfileError& error) {
    std::fprintf(stderr, "zp report: %s\n", error.what());
    return 1;
  }
}

}  // namespace zeropage::tools
