// The tables of the options about saved state (zeropage/fields.h), as zeropage/option_fields.h.
#pragma once

#include "zeropage/fields.h"
#include "zeropage/saving.h"

namespace zeropage {

constexpr auto table_of(std::type_identity<SaveOptions>) {
  using memory::field;
  return std::tuple(memory::section(
      "A save",
      field<&SaveOptions::update_latest>({.help = "Make the folder's latest point to this state"}),
      field<&SaveOptions::direct_io>(
          {.help = "Write past the page cache, where the file system can"}),
      field<&SaveOptions::deadline>({.help = "How long ranks wait for the slowest one's disk"}),
      field<&SaveOptions::weights_as>(
          {.help = "Which values save_weights() writes", .words = "module,fp32,average"}),
      field<&SaveOptions::prefix>(
          {.help = "Text in front of every name that save_weights() writes"})));
}
static_assert(memory::tells_all_fields<SaveOptions>());

constexpr auto table_of(std::type_identity<StateSaverOptions>) {
  using memory::Bounds, memory::field;
  return std::tuple(memory::section(
      "Saving again and again",
      field<&StateSaverOptions::keep_last>(
          {.help = "Keep the newest N states and remove older ones",
           .default_word = "all stay",
           .flag = {"keep-last", "N"},
           .bounds = Bounds::positive()}),
      field<&StateSaverOptions::keep_every>(
          {.help = "Also keep states whose step is a multiple of N",
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
      field<&StateSaverOptions::save>({.help = "Options of each save"})));
}
static_assert(memory::tells_all_fields<StateSaverOptions>());

constexpr auto table_of(std::type_identity<LoadOptions>) {
  using memory::field;
  return std::tuple(memory::section(
      "Loading",
      field<&LoadOptions::fall_back>({.help = "Load an older state where the newest is damaged",
                                      .words = "on,off",
                                      .flag = {"resume-fall-back", "{}="}}),
      field<&LoadOptions::strict>(
          {.help = "Require every parameter, buffer and state, and nothing else"}),
      field<&LoadOptions::names>(
          {.help = "Names in the state for names of the model; others are the same"}),
      field<&LoadOptions::verify_first>(
          {.help = "Check all checksums before anything of the model changes"}),
      field<&LoadOptions::optimizer_options>(
          {.help =
               "Take learning rates and other options of the optimizer's groups from the state"}),
      field<&LoadOptions::random>({.help = "Continue the generators of random numbers"}),
      field<&LoadOptions::deadline>({.help = "How long ranks wait for the slowest one's disk"}),
      field<&LoadOptions::prefix>({.help = "Text in front of every name in the state"})));
}
static_assert(memory::tells_all_fields<LoadOptions>());

constexpr auto table_of(std::type_identity<ModuleLoadOptions>) {
  using memory::field;
  return std::tuple(memory::section(
      "Loading into a plain module",
      field<&ModuleLoadOptions::strict>(
          {.help = "Require every parameter and buffer, and nothing else"}),
      field<&ModuleLoadOptions::names>(
          {.help = "Names in the file for names of the module; others are the same"}),
      field<&ModuleLoadOptions::prefix>({.help = "Text in front of every name in the file"})));
}
static_assert(memory::tells_all_fields<ModuleLoadOptions>());

}  // namespace zeropage
