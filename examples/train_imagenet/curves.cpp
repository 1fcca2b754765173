#include "train_imagenet/curves.h"

#include <map>
#include <sstream>

#include <nlohmann/json.hpp>

#include "charts/chart.h"

namespace train_imagenet {

std::string curves(const std::string& metrics) {
  // By a value's name in metrics.jsonl, its series for each part of the data.
  std::map<std::string, std::map<std::string, charts::Series>> by_value;
  std::istringstream lines(metrics);
  for (std::string line; std::getline(lines, line);) {
    const auto measured = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!measured.is_object()) continue;
    const std::string of = measured.at("of");
    for (const char* const value : {"loss", "top1"}) {
      charts::Series& series = by_value[value][of];
      series.name = of;
      series.mark = of == "training" ? charts::Mark::kLine : charts::Mark::kLineAndDots;
      // A loss that was not finite is null.
      if (!measured.at(value).is_number()) continue;
      series.points.push_back({measured.at("epoch"), measured.at(value)});
    }
  }
  std::vector<charts::Panel> panels = {
      {.title = "loss", .x = {.label = "epochs"}},
      {.title = "top-1, share of images", .x = {.label = "epochs"}}};
  for (const auto& [of, series] : by_value["loss"]) panels[0].series.push_back(series);
  for (const auto& [of, series] : by_value["top1"]) panels[1].series.push_back(series);
  return charts::svg(panels);
}

}  // namespace train_imagenet
