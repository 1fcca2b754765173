#include "examples/train_gpt/state_flags.h"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "examples/train_gpt/value_options.h"
#include "memory/check.h"

namespace train_gpt {

zeropage::StateSaverOptions StateFlags::saver_options() const {
  return {.keep_last = keep_last,
          .keep_every = keep_every,
          .asynchronous = asynchronous,
          .on_sigterm = on_sigterm};
}

void StateFlags::check() const {
  const bool has_details =
      every > 0 || keep_last > 0 || keep_every > 0 || !asynchronous || on_sigterm;
  ZP_CHECK(saves() || !has_details,
           "--save-every, --keep-last, --keep-every, --save-async and --save-on-sigterm are about "
           "what is saved; use --save DIR, or leave them out");
  ZP_CHECK(keep_every == 0 || keep_last > 0, "--keep-every ", keep_every,
           ": all states stay unless --keep-last says how many; use it, or leave this out");
  ZP_CHECK(!fall_back || !resume.empty(),
           "--resume-fall-back on: is about what is resumed; use --resume DIR, or leave it out");
}

void add_state(CLI::App& app, StateFlags& flags) {
  app.add_option("--save", flags.folder,
                 "Folder for the run's states: DIR/step-N, the newest as DIR/latest; at the end")
      ->option_text("DIR");
  app.add_option("--save-every", flags.every, "And after every K steps")
      ->check(positive())
      ->option_text("K");
  app.add_option("--keep-last", flags.keep_last, "Remove older states than the newest N")
      ->check(positive())
      ->option_text("N");
  app.add_option("--keep-every", flags.keep_every, "But those whose step is a multiple of N")
      ->check(positive())
      ->option_text("N");
  add_switch(app, "--save-async", flags.asynchronous,
             "Write beside training, from a copy in host memory");
  add_switch(app, "--save-on-sigterm", flags.on_sigterm, "Save and end when SIGTERM comes");
  app.add_option("--resume", flags.resume,
                 "Go on from a state, or a run's newest one, at any stage and number of ranks")
      ->option_text("DIR");
  add_switch(app, "--resume-fall-back", flags.fall_back,
             "From an older one where the newest is damaged");
}

void write_state(const StateFlags& flags, nlohmann::json& json) {
  json["save"] = flags.folder;
  json["save-every"] = flags.every;
  json["keep-last"] = flags.keep_last;
  json["keep-every"] = flags.keep_every;
  json["save-async"] = flags.asynchronous ? "on" : "off";
  json["save-on-sigterm"] = flags.on_sigterm ? "on" : "off";
  json["resume"] = flags.resume;
  json["resume-fall-back"] = flags.fall_back ? "on" : "off";
}

}  // namespace train_gpt
