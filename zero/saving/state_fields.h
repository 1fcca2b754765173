// The tables of the options about saved state (memory/fields.h), as zero/option_fields.h.
#pragma once

#include "memory/fields.h"
#include "zero/saving/module_weights.h"
#include "zero/saving/state_saver.h"

namespace zeropage {

constexpr auto table_of(std::type_identity<SaveOptions>) {
  using memory::field;
  return std::tuple(memory::section(
      "A save",
      field<&SaveOptions::update_latest>({.help = "Whether the folder's latest names it"}),
      field<&SaveOptions::direct_io>({.help = "Past the page cache, where the file system can"}),
      field<&SaveOptions::deadline>({.help = "How long ranks wait for the slowest one's disk"}),
      field<&SaveOptions::weights_as>(
          {.help = "In what save_weights() writes weights", .words = "module,fp32,average"}),
      field<&SaveOptions::prefix>({.help = "In front of every name that save_weights() writes"})));
}
static_assert(memory::tells_all_fields<SaveOptions>());

constexpr auto table_of(std::type_identity<StateSaverOptions>) {
  using memory::Bounds, memory::field;
  return std::tuple(memory::section(
      "Saving again and again",
      field<&StateSaverOptions::keep_last>({.help = "Remove older states than the newest N",
                                            .default_word = "all stay",
                                            .flag = {"keep-last", "N"},
                                            .bounds = Bounds::positive()}),
      field<&StateSaverOptions::keep_every>({.help = "But those whose step is a multiple of N",
                                             .default_word = "none",
                                             .flag = {"keep-every", "N"},
                                             .bounds = Bounds::positive()}),
      field<&StateSaverOptions::asynchronous>(
          {.help = "Write beside training, from a copy in host memory",
           .words = "on,off",
           .flag = {"save-async", "{}="}}),
      field<&StateSaverOptions::on_signal>({.help = "Save and end when SIGTERM or SIGINT comes",
                                            .words = "on,off",
                                            .flag = {"save-on-signal", "{}="}}),
      field<&StateSaverOptions::save>({.help = "Each save"})));
}
static_assert(memory::tells_all_fields<StateSaverOptions>());

constexpr auto table_of(std::type_identity<LoadOptions>) {
  using memory::field;
  return std::tuple(memory::section(
      "Loading",
      field<&LoadOptions::fall_back>({.help = "From an older one where the newest is damaged",
                                      .words = "on,off",
                                      .flag = {"resume-fall-back", "{}="}}),
      field<&LoadOptions::strict>(
          {.help = "Every parameter, buffer and state is there, and nothing else"}),
      field<&LoadOptions::names>({.help = "The model's names by those in the state"}),
      field<&LoadOptions::verify_first>(
          {.help = "All checksums are looked at before anything of the model changes"}),
      field<&LoadOptions::optimizer_options>(
          {.help = "Learning rates and other options of the optimizer's groups are the state's"}),
      field<&LoadOptions::random>({.help = "Generators of random numbers go on where they were"}),
      field<&LoadOptions::deadline>({.help = "How long ranks wait for the slowest one's disk"}),
      field<&LoadOptions::prefix>({.help = "What the state has in front of every name"})));
}
static_assert(memory::tells_all_fields<LoadOptions>());

constexpr auto table_of(std::type_identity<ModuleLoadOptions>) {
  using memory::field;
  return std::tuple(memory::section(
      "Loading into a plain module",
      field<&ModuleLoadOptions::strict>(
          {.help = "Every parameter and buffer is there, and nothing else"}),
      field<&ModuleLoadOptions::names>(
          {.help = "The module's names -> names in the file; others are as they are"}),
      field<&ModuleLoadOptions::prefix>({.help = "What the file has in front of every name"})));
}
static_assert(memory::tells_all_fields<ModuleLoadOptions>());

}  // namespace zeropage
