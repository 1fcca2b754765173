// Every option is told once: ranks that differ in it are told by its name, and docs/options.md is made of
// the tables.
#include "zeropage/option_fields.h"

#include <cctype>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "accumulate/accumulator_fields.h"
#include "checkpointing/option_fields.h"
#include "comm/world_fields.h"
#include "saving/state_fields.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "zero/tiers/nvme_activations_fields.h"

namespace zeropage::option_fields_test {
namespace {

using namespace zeropage::testing;
using memory::Compared;
using memory::HasTable;
using memory::HasText;
using memory::HasWords;
using memory::IsOptionalTable;
using memory::text_of;
using memory::words_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// ---- Another value of each type ----

void change(bool& value) {
  value = !value;
}
void change(std::string& value) {
  value += "x";
}
void change(Stage& stage) {
  stage = Stage::kParameters;
}
template <typename T>
requires std::is_arithmetic_v<T>
void change(T& value) {
  value = value == 7 ? 8 : 7;
}
template <HasWords Enum>
void change(Enum& value) {
  const auto words = words_of(std::type_identity<Enum>());
  value = value == words.front().value ? words.back().value : words.front().value;
}
template <typename T>
void change(std::optional<T>& value) {
  change(value.emplace());
}
template <typename S>
struct Changed {
  std::string name;
  Compared compared;
  S options;
};

// For each field that a change is known of, the defaults with that one changed.
template <typename S, typename Inner, typename Reach>
void change_each(const std::string& prefix, const Reach& reach, std::vector<Changed<S>>& all) {
  memory::for_each_field<Inner>([&](const auto& field) {
    using F = std::remove_cvref_t<decltype(field)>;
    using Value = typename F::Value;
    const std::string name = prefix + std::string(F::name());
    if constexpr (HasTable<Value>) {
      change_each<S, Value>(
          name + ".", [&](S& options) -> Value& { return reach(options).*F::kMember; }, all);
    } else if constexpr (IsOptionalTable<Value>) {
      change_each<S, typename Value::value_type>(
          name + ".",
          [&](S & options) -> auto& {
            auto& value = reach(options).*F::kMember;
            if (!value) value.emplace();
            return *value;
          },
          all);
    } else if constexpr (requires(Value & value) { change(value); }) {
      Changed<S> changed{name, field.text.compared, {}};
      change(reach(changed.options).*F::kMember);
      all.push_back(changed);
    }
  });
}

template <typename S>
std::vector<Changed<S>> changed_options(const std::string& prefix) {
  std::vector<Changed<S>> all;
  change_each<S, S>(
      prefix, [](S& options) -> S& { return options; }, all);
  return all;
}

std::vector<std::string> lines_of(const Options& options) {
  return describe(options);
}
// With those that are optional, so that lines correspond.
std::vector<std::string> lines_of(AccumulatorOptions options) {
  if (!options.loss_scaler) options.loss_scaler.emplace();
  if (!options.norm_spikes) options.norm_spikes.emplace();
  std::vector<std::string> lines;
  memory::describe_fields("", options, lines);
  return lines;
}

// Names of the lines that differ.
template <typename S>
std::vector<std::string> names_that_differ(const S& first, const S& second) {
  const auto ours = lines_of(first), theirs = lines_of(second);
  EXPECT_EQ(ours.size(), theirs.size());
  std::vector<std::string> names;
  for (size_t line = 0; line < ours.size(); ++line) {
    if (ours[line] != theirs[line]) names.push_back(ours[line].substr(0, ours[line].find(':')));
  }
  return names;
}

// may_differ: what ranks do not compare.
template <typename S>
void expect_each_is_told_by_its_name(const std::string& prefix,
                                     const std::vector<std::string>& may_differ) {
  const auto all = changed_options<S>(prefix);
  EXPECT_GT(all.size(), may_differ.size());
  std::vector<std::string> uncompared;
  for (const Changed<S>& changed : all) {
    const auto names = names_that_differ(S(), changed.options);
    if (changed.compared == Compared::kYes) {
      EXPECT_THAT(names, ElementsAre(changed.name));
    } else {
      EXPECT_TRUE(names.empty()) << changed.name;
      uncompared.push_back(changed.name);
    }
  }
  EXPECT_EQ(uncompared, may_differ);
}

TEST(OptionFieldsTest, OptionsThatDifferBetweenRanksAreToldByTheirName) {
  expect_each_is_told_by_its_name<Options>(
      "options.", {"options.offload.worker_threads", "options.offload.link_bytes_per_second",
                   "options.offload.nvme_directory"});
  expect_each_is_told_by_its_name<AccumulatorOptions>("", {"gradient_budget_bytes"});
}

TEST(OptionFieldsTest, RanksRefuseEveryOptionThatDiffers) {
  run_ranks(2, [](comm::World& world) {
    for (const auto& changed : changed_options<Options>("options.")) {
      if (changed.compared == Compared::kNo) continue;
      const Options options = world.rank() == 0 ? Options() : changed.options;
      const std::string error =
          error_of([&] { world.check_agreement("the model", describe(options)); });
      EXPECT_THAT(error, HasSubstr("rank 0 has " + changed.name + ": "));
      EXPECT_THAT(error, HasSubstr("rank 1 has " + changed.name + ": "));
    }
  });
}

TEST(OptionFieldsTest, ValuesAreInWords) {
  Options options;
  options.reshard = Reshard::kAfterStep;
  options.offload.step = StepWhen::kOneStepLate;
  options.compute_dtype = c10::kHalf;
  const auto lines = describe(options);
  for (const std::string line :
       {"options.reshard: step", "options.offload.step: late", "options.compute_dtype: fp16",
        "options.prefetch_bytes: two largest pages", "options.world_invariant: false"}) {
    EXPECT_THAT(lines, ::testing::Contains(line));
  }
}

TEST(OptionFieldsTest, NumbersAreToldToTheLastDigit) {
  const double next = std::nextafter(1.0, 2.0);
  EXPECT_THAT(
      names_that_differ(AccumulatorOptions{.clip_norm = 1}, AccumulatorOptions{.clip_norm = next}),
      ElementsAre("clip_norm"));
  EXPECT_EQ(text_of(16777216.0), "16777216");
}

// ---- The page ----

template <typename T>
std::string_view type_name() {
  return memory::detail::last_name(__PRETTY_FUNCTION__);
}

template <typename T>
std::string link_to() {
  std::string anchor(type_name<T>());
  for (char& letter : anchor) letter = static_cast<char>(std::tolower(letter));
  return c10::str("[", type_name<T>(), "](#", anchor, ")");
}

template <typename T>
struct ValuesOf {
  static std::string text() {
    if constexpr (HasTable<T>) {
      return link_to<T>();
    } else if constexpr (HasWords<T>) {
      std::string all;
      for (const auto& known : words_of(std::type_identity<T>())) {
        all += c10::str(all.empty() ? "" : ", ", "`", known.name, "` ", known.word);
      }
      return all;
    } else if constexpr (std::is_same_v<T, bool>) {
      return "true, false";
    } else {
      return std::is_arithmetic_v<T> ? "a number" : "";
    }
  }
};
template <typename T>
struct ValuesOf<std::optional<T>> : ValuesOf<T> {};

template <typename S>
std::string page_of(const std::string& header) {
  std::ostringstream out;
  out << "\n## " << type_name<S>() << "\n\n`<" << header << ">`\n";
  size_t sections = 0;
  memory::for_each_section<S>([&](const auto&) { ++sections; });
  memory::for_each_section<S>([&](const auto& section) {
    if (sections > 1) out << "\n### " << section.title << "\n";
    out << "\n| field | unit or values | default | meaning | flag |\n|---|---|---|---|---|\n";
    memory::for_each_field(section, [&](const auto& field) {
      using F = std::remove_cvref_t<decltype(field)>;
      std::string by_default(field.text.default_word);
      if constexpr (HasText<typename F::Value>) by_default = text_in(field, S());
      out << "| `" << F::name() << "` | "
          << (field.text.unit.empty() ? ValuesOf<typename F::Value>::text()
                                      : std::string(field.text.unit))
          << " | " << by_default << " | " << field.text.help << " | "
          << (field.text.flag.name.empty() ? "" : c10::str("`--", field.text.flag.name, "`"))
          << " |\n";
    });
  });
  return out.str();
}

std::string page() {
  return "# Options\n\nOne line on each option; the headers say more. Flags are `train_gpt`'s, "
         "whose "
         "words for the values of an enum are behind the enumerators;\nthose of LaunchOptions are "
         "`zp run`'s. This page is made of the "
         "tables that also make the flags and what ranks compare (`<zeropage/fields.h>`).\n" +
         page_of<Options>("zeropage/options.h") + page_of<OffloadOptions>("zeropage/options.h") +
         page_of<AccumulatorOptions>("zeropage/accumulator.h") +
         page_of<accumulate::LossScalerOptions>("zeropage/accumulator.h") +
         page_of<accumulate::NormSpikeOptions>("zeropage/accumulator.h") +
         page_of<checkpointing::RecomputeOptions>("zeropage/recompute.h") +
         page_of<checkpointing::ActivationOffloadOptions>("zeropage/activation_offload.h") +
         page_of<NvmeActivationsOptions>("zeropage/activation_offload.h") +
         page_of<checkpointing::CheckpointOptions>("zeropage/checkpoint.h") +
         page_of<checkpointing::PartitionOptions>("zeropage/activation_offload.h") +
         page_of<comm::WorldOptions>("zeropage/world.h") +
         page_of<comm::LaunchOptions>("zeropage/launcher.h") +
         page_of<comm::ThreadsOptions>("zeropage/world.h") +
         page_of<comm::SimulationOptions>("zeropage/simulation.h") +
         page_of<StateSaverOptions>("zeropage/saving.h") +
         page_of<SaveOptions>("zeropage/saving.h") + page_of<LoadOptions>("zeropage/saving.h") +
         page_of<ModuleLoadOptions>("zeropage/saving.h");
}

TEST(OptionsPageTest, IsWhatTheTablesSay) {
  const std::string path = ZEROPAGE_SOURCE_DIR "/docs/options.md";
  if (std::getenv("ZEROPAGE_WRITE_TABLES") != nullptr) std::ofstream(path) << page();
  std::ifstream file(path);
  std::ostringstream written;
  written << file.rdbuf();
  EXPECT_EQ(written.str(), page())
      << "run this test with ZEROPAGE_WRITE_TABLES=1 and commit docs/options.md";
}

TEST(OptionsPageTest, SaysOfEachFieldWhatItIsFor) {
  std::set<std::string_view> flags;
  const auto look = [&](const auto& field) {
    using F = std::remove_cvref_t<decltype(field)>;
    EXPECT_FALSE(field.text.help.empty()) << F::name();
    const std::string_view flag = field.text.flag.name;
    EXPECT_TRUE(flag.empty() || flags.insert(flag).second) << flag << " is two fields' flag";
  };
  memory::for_each_field<Options>(look);
  memory::for_each_field<OffloadOptions>(look);
  memory::for_each_field<AccumulatorOptions>(look);
  memory::for_each_field<accumulate::LossScalerOptions>(look);
  memory::for_each_field<accumulate::NormSpikeOptions>(look);
  memory::for_each_field<checkpointing::RecomputeOptions>(look);
  memory::for_each_field<checkpointing::ActivationOffloadOptions>(look);
  memory::for_each_field<NvmeActivationsOptions>(look);
  memory::for_each_field<checkpointing::CheckpointOptions>(look);
  memory::for_each_field<checkpointing::PartitionOptions>(look);
  memory::for_each_field<comm::WorldOptions>(look);
  memory::for_each_field<comm::LaunchOptions>(look);
  memory::for_each_field<comm::ThreadsOptions>(look);
  memory::for_each_field<comm::SimulationOptions>(look);
  memory::for_each_field<StateSaverOptions>(look);
  memory::for_each_field<SaveOptions>(look);
  memory::for_each_field<LoadOptions>(look);
  memory::for_each_field<ModuleLoadOptions>(look);
}

}  // namespace
}  // namespace zeropage::option_fields_test
