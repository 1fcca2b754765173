// Why rings replaced parameter servers: four shapes of all_reduce, what they put on the busiest link, and how long they
// take, over the number of ranks.
//
//   all_reduce_shapes --bytes 4MiB --svg shapes.svg
#include <iostream>
#include <optional>

#include <CLI/CLI.hpp>

#include "all_reduce_shapes/chart.h"
#include "all_reduce_shapes/figures.h"
#include "command_line/command_line.h"
#include "output_files/output_files.h"

int main(int argc, char** argv) {
  all_reduce_shapes::Options options{.bytes = 0, .most_ranks = 8, .repeats = 5};
  std::string bytes = "4MiB";
  std::string picture;
  CLI::App app("Four shapes of all_reduce: bytes at the busiest link, and time");
  app.add_option("--bytes", bytes, "Size of the tensor, a multiple of 4 KiB")
      ->capture_default_str();
  app.add_option("--most-ranks", options.most_ranks, "Most ranks that are measured")
      ->check(CLI::Range(2, 8))
      ->capture_default_str();
  app.add_option("--repeats", options.repeats, "Repeats, of which the fastest counts")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--svg", picture, "File for the chart");
  if (const std::optional<int> ended = examples::parse(app, argc, argv)) return *ended;
  try {
    options.bytes = zeropage::memory::parse_bytes(bytes);
    // A slice of 1024 ranks has an element or more.
    TORCH_CHECK(options.bytes > 0 && options.bytes % 4096 == 0, "--bytes ", bytes,
                ": expected a multiple of 4 KiB, so that it divides into 1024 slices");
    examples::check_outputs({{"--svg", picture}});
    const all_reduce_shapes::Figures figures = all_reduce_shapes::find(options);
    std::cout << all_reduce_shapes::table(options, figures);
    if (!picture.empty()) {
      examples::write_output({"--svg", picture}, all_reduce_shapes::svg(options, figures));
    }
  } catch (const std::exception& error) {
    std::cerr << "all_reduce_shapes: " << zeropage::memory::message_of(error) << '\n';
    return 1;
  }
  return 0;
}
