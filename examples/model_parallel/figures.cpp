#include "model_parallel/figures.h"

#include <algorithm>
#include <cstdio>
#include <fstream>

#include <nlohmann/json.hpp>
#include <zeropage/bytes.h>
#include <zeropage/check.h>

#include "charts/chart.h"
#include "output_files/output_files.h"

namespace model_parallel {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(WayFigures, way, split_size, images_per_second, peak_bytes, loss)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Figures, name, ranks, batch, image_side, width, ways)

namespace {

constexpr const char* kSingle = "single";
constexpr const char* kNaive = "naive";

bool is_pipelined(const WayFigures& way) {
  return way.way != kSingle && way.way != kNaive;
}

const WayFigures* best_pipelined(const Figures& figures) {
  const WayFigures* best = nullptr;
  for (const WayFigures& way : figures.ways) {
    if (is_pipelined(way) && (best == nullptr || way.median() > best->median())) best = &way;
  }
  return best;
}

std::string words(const Figures& figures) {
  return "batch " + std::to_string(figures.batch) + ", images of " +
         std::to_string(figures.image_side) + " pixels, width " + std::to_string(figures.width) +
         ", " + std::to_string(figures.ranks) + " ranks";
}

}  // namespace

double WayFigures::median() const {
  std::vector<double> sorted = images_per_second;
  std::sort(sorted.begin(), sorted.end());
  const size_t middle = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

std::string table(const Figures& figures) {
  const double single = figures.ways.front().median();
  std::string text = figures.name + ", ResNet-50, " + words(figures) + "\n";
  char row[200];
  std::snprintf(row, sizeof(row), "%-10s %10s %17s %10s %12s %10s\n", "way", "images/s",
                "least to most", "x single", "peak memory", "loss");
  text += row;
  for (const WayFigures& way : figures.ways) {
    const auto [least, most] =
        std::minmax_element(way.images_per_second.begin(), way.images_per_second.end());
    const std::string memory =
        way.peak_bytes > 0 ? zeropage::memory::format_bytes(way.peak_bytes) : "-";
    std::snprintf(row, sizeof(row), "%-10s %10.2f %8.2f %8.2f %10.2f %12s %10.6f\n",
                  way.way.c_str(), way.median(), *least, *most, way.median() / single,
                  memory.c_str(), way.loss);
    text += row;
  }
  return text;
}

void check_alike(const std::vector<Figures>& sides) {
  for (const Figures& side : sides) {
    ZP_CHECK(words(side) == words(sides.front()) && side.ways.size() == sides.front().ways.size(),
             "--draw: expected figures of the same runs, got ", words(sides.front()), " with ",
             sides.front().ways.size(), " ways of ", sides.front().name, ", and ", words(side),
             " with ", side.ways.size(), " of ", side.name);
    for (size_t way = 0; way < side.ways.size(); ++way) {
      ZP_CHECK(side.ways[way].way == sides.front().ways[way].way, "--draw: expected the way \"",
               sides.front().ways[way].way, "\" of ", side.name, ", got \"", side.ways[way].way,
               "\"; give both the same split sizes");
    }
  }
}

std::string chart(const std::vector<Figures>& sides) {
  charts::Panel ways{
      .title = "images a second: ResNet-50 over " + std::to_string(sides.front().ranks) + " ranks",
      .x = {.names = {kSingle, kNaive, "best split"}}};
  charts::Panel splits{.title = "images a second: pipelined, by split size",
                       .x = {.label = "images of a micro-batch"}};
  for (const WayFigures& way : sides.front().ways) {
    if (is_pipelined(way)) splits.x.names.push_back(std::to_string(way.split_size));
  }
  for (const Figures& side : sides) {
    charts::Series of_ways{.name = side.name, .mark = charts::Mark::kBars}, of_splits = of_ways;
    for (const WayFigures& way : side.ways) {
      charts::Series& series = is_pipelined(way) ? of_splits : of_ways;
      series.points.push_back({static_cast<double>(series.points.size()), way.median()});
    }
    if (const WayFigures* const best = best_pipelined(side)) {
      of_ways.points.push_back({2, best->median()});
    }
    ways.series.push_back(of_ways);
    splits.series.push_back(of_splits);
  }
  return charts::svg({ways, splits});
}

void write(const std::string& file, const Figures& figures) {
  examples::write_output({"--json", file}, nlohmann::json(figures).dump(1) + '\n');
}

Figures read(const std::string& file) {
  std::ifstream in(file);
  ZP_CHECK(in.good(), "--draw ", file, ": cannot be read; is it there?");
  Figures figures;
  try {
    figures = nlohmann::json::parse(in).get<Figures>();
  } catch (const nlohmann::json::exception& error) {
    ZP_THROW("--draw ", file,
             ": expected figures that --json wrote, got something else: ", error.what());
  }
  ZP_CHECK(!figures.ways.empty() && figures.ways.front().way == kSingle, "--draw ", file,
           ": expected the way \"single\" first; give a file that --json wrote");
  for (const WayFigures& way : figures.ways) {
    ZP_CHECK(!way.images_per_second.empty(), "--draw ", file, ": expected a round of the way \"",
             way.way, "\", got none");
  }
  return figures;
}

}  // namespace model_parallel
