#include "train_resnet/figures.h"

#include <cstdio>
#include <fstream>

#include <nlohmann/json.hpp>
#include <zeropage/bytes.h>
#include <zeropage/check.h>

#include "output_files/output_files.h"

namespace train_resnet {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Figures, way, stage, steps, seconds_an_epoch, images_a_second,
                                   loss, peak_bytes, accuracy, weights_sha256)

namespace {

std::string row_of(const Figures& run) {
  char row[200];
  std::snprintf(row, sizeof(row), "%-16s %5d %6ld %10.1f %10.1f %11.6f %11s %8.2f %%  %.8s\n",
                run.way.c_str(), run.stage, static_cast<long>(run.steps), run.seconds_an_epoch,
                run.images_a_second, run.loss,
                zeropage::memory::format_bytes(run.peak_bytes).c_str(), 100 * run.accuracy,
                run.weights_sha256.c_str());
  return row;
}

}  // namespace

std::string added_to_table(const std::string& file, const Figures& figures) {
  {
    std::ofstream out(file, std::ios::app);
    out << nlohmann::json(figures).dump() << '\n';
    out.close();
    ZP_CHECK(out.good(), "--table ", file, ": cannot be written; is its folder there?");
  }
  char head[200];
  std::snprintf(head, sizeof(head), "%-16s %5s %6s %10s %10s %11s %11s %10s  %s\n", "ranks",
                "stage", "steps", "s/epoch", "images/s", "loss", "memory", "accuracy", "weights");
  std::string table = head;
  std::ifstream in(file);
  int64_t number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    try {
      table += row_of(nlohmann::json::parse(line).get<Figures>());
    } catch (const nlohmann::json::exception& error) {
      ZP_THROW("--table ", file, ", line ", number, ": is no run of train_resnet: ", error.what(),
               "; give another file");
    }
  }
  return table;
}

void write_json(const std::string& file, const Figures& figures) {
  examples::write_output({"--json", file}, nlohmann::json(figures).dump(1) + '\n');
}

}  // namespace train_resnet
