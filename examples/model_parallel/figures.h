// What was measured of every way to train, as a table, a chart and a file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace model_parallel {

struct WayFigures {
  std::string way;         // "single", "naive", "split 4"
  int64_t split_size = 0;  // images of a micro-batch; the whole batch for the first two
  std::vector<double> images_per_second;  // of each round
  int64_t peak_bytes = 0;                 // of the rank that held most; 0: not measured
  double loss = 0;                        // after the last step

  double median() const;
};

struct Figures {
  std::string name;  // of the program
  int ranks = 0;
  int64_t batch = 0;
  int64_t image_side = 0;
  int64_t width = 0;
  std::vector<WayFigures> ways;
};

std::string table(const Figures& figures);

// Throws unless the sides, each of one program, measured the same ways in the same order.
void check_alike(const std::vector<Figures>& sides);

// Bars of the medians: the three ways, pipelined by its best split size, and beside them all split sizes. sides: alike.
std::string chart(const std::vector<Figures>& sides);

void write(const std::string& file, const Figures& figures);
// Throws where the file is not what write() writes.
Figures read(const std::string& file);

}  // namespace model_parallel
