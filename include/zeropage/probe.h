// A look at the machine before a run: how fast each rank multiplies matrices, copies memory, sends to other ranks and, where
// asked, writes and reads a disk. Ranks wait for each other in each step, so a single slow one slows all of them, and nothing
// else says which it is.
//
//   const ProbeReport report = probe(world);
//   if (world.rank() == 0) std::cout << report.to_string();
//
//   rank 3 is slow: matrix product 0.51 TFLOP/s, the median of 8 ranks is 1.02 TFLOP/s
#pragma once

#include <string>
#include <vector>

#include "zeropage/world.h"

namespace zeropage {

struct ProbeOptions {
  // A rank is slow in what it does at less than this part of the median over all ranks. Above 0, below 1. Figures of ranks that
  // share a busy machine differ by a tenth and more.
  double slow_below = 0.7;
  // For each figure. Default: a second for all of them, with a disk.
  double seconds = 0.2;
  // A folder on a local disk of each rank, which 32 MiB are written to and read from; "": no disk is measured.
  std::string disk_directory = {};
};

// A figure of all ranks.
struct ProbeFigure {
  std::string what = {};  // "matrix product", "memory copy", "link", "disk write", "disk read"
  std::string unit = {};  // "FLOP/s" or "B/s"
  std::vector<double> by_rank = {};  // in a second
  double median = 0;
};

struct SlowRank {
  int rank = 0;  // in the world
  std::string what = {};
  std::string unit = {};
  double figure = 0;
  double median = 0;
};

struct ProbeReport {
  std::vector<ProbeFigure> figures = {};
  std::vector<SlowRank> slow = {};  // by figure, then by rank; empty: none is
  double seconds = 0;               // that it took

  // A line for each figure, with the least, the median and the largest, and one for each slow rank.
  std::string to_string() const;
};

// The same on all ranks. All ranks measure at the same time, as in a step, so ranks of a host share its memory and its disk.
//
// * matrix product: of square matrices, in fp32 on the host's threads of this rank and in bf16 on an accelerator.
// * memory copy: within the memory of the world's device. Bytes read and written.
// * link: with each of its two neighbours in the ring of ranks, one after the other; the faster one counts, since a slow rank
//   slows its neighbours too. Bytes sent and received. Two ranks have one link, so neither is slower than the other in it.
//
// Takes about a second, and 128 MiB a rank for a moment (512 MiB on an accelerator). Collective. Throws for options out of
// bounds, and what a disk does.
ProbeReport probe(const comm::World& world, const ProbeOptions& options = {});

}  // namespace zeropage
