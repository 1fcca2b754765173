// Times step() of Muon on ranks that have parts of the matrices, beside AdamW's and beside two ways that gather all matrices
// on each rank. matrix_updates --help.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include "bench/json_file.h"
#include "bench/measuring_main.h"
#include "bench/spread.h"
#include "zeropage/ledger.h"
#include "zeropage/muon.h"
#include "zeropage/zeropage.h"

namespace {

using bench::Spread;
using zeropage::Muon;
using zeropage::MuonOptions;
using zeropage::comm::World;

struct Flags {
  std::vector<int> ranks = {2, 4};
  int64_t d_model = 512;
  int64_t layers = 4;
  int stage = 2;
  int rounds = 7;
  std::string json;
};

// The matrices of transformer blocks, which are used by one operator each: a step is all that is measured.
struct MatricesImpl : torch::nn::Module {
  explicit MatricesImpl(const Flags& flags) {
    const int64_t d = flags.d_model;
    for (int64_t layer = 0; layer < flags.layers; ++layer) {
      for (const auto& [rows, columns] :
           {std::pair(3 * d, d), std::pair(d, d), std::pair(4 * d, d), std::pair(d, 4 * d)}) {
        const std::string name = "weight" + std::to_string(parameters().size());
        register_parameter(name, at::empty({rows, columns}).uniform_(-1, 1));
      }
    }
  }
  at::Tensor forward() const {
    at::Tensor sum = at::zeros({});
    for (const at::Tensor& matrix : parameters()) sum = sum + matrix.square().sum();
    return sum;
  }
};
TORCH_MODULE(Matrices);

using Model = zeropage::DistributedDataParallel<Matrices>;

// step() of a wrapped model, whose gradients are made anew before each.
template <typename A>
class Ours {
 public:
  Ours(const Flags& flags, const World& world,
       const typename zeropage::OptimizerTraits<A>::Options& options)
      : model_(Matrices(flags), world, options_of(flags)), optimizer_(model_, options) {}

  void prepare() {
    optimizer_.zero_grad();
    model_().backward();
  }
  void step() { optimizer_.step(); }

 private:
  static zeropage::Options options_of(const Flags& flags) {
    zeropage::Options options;
    options.stage = zeropage::stage_of(flags.stage);
    return options;
  }

  Model model_;
  zeropage::Optimizer<A> optimizer_;
};

// Momentum is sharded as Zeropage's is, and every rank gathers all of it, a matrix at a time.
class GatheringAll {
 public:
  // shares: each rank transforms some of the matrices, the dearest first, and all have the results from it; otherwise each
  // rank transforms all of them.
  GatheringAll(const Flags& flags, const World& world, bool shares)
      : world_(world), shares_(shares) {
    const Matrices module(flags);
    for (const at::Tensor& parameter : module->parameters()) {
      const int64_t part = (parameter.numel() + world.size() - 1) / world.size();
      matrices_.push_back({.sizes = parameter.sizes().vec(),
                           .values = at::zeros({part}),
                           .momentum = at::zeros({part}),
                           .gradient = at::ones({part})});
    }
    assign_owners();
  }

  void prepare() {}

  void step() {
    const torch::NoGradGuard no_grad;
    for (Matrix& matrix : matrices_) {
      matrix.momentum.lerp_(matrix.gradient, 1 - options_.momentum());
      const at::Tensor direction = matrix.gradient.lerp(matrix.momentum, options_.momentum());
      matrix.whole = at::empty({direction.numel() * world_.size()});
      part_of(matrix).copy_(direction);
      matrix.pending = world_.communicator().all_gather(matrix.whole, "a matrix");
    }
    for (Matrix& matrix : matrices_) {
      matrix.pending.wait();
      if (!shares_ || matrix.owner == world_.rank()) {
        const int64_t numel = matrix.sizes[0] * matrix.sizes[1];
        const at::Tensor own = matrix.whole.narrow(0, 0, numel).view(matrix.sizes);
        own.copy_(zeropage::orthogonalised(own, options_));
      }
      if (shares_) {
        matrix.pending = world_.communicator().broadcast(matrix.whole, matrix.owner, "an update");
      }
    }
    for (Matrix& matrix : matrices_) {
      matrix.pending.wait();
      matrix.values.mul_(1 - options_.lr() * options_.weight_decay())
          .sub_(part_of(matrix), options_.lr());
      matrix.whole.reset();
      matrix.pending = {};
    }
  }

 private:
  struct Matrix {
    std::vector<int64_t> sizes;
    at::Tensor values, momentum, gradient;  // this rank's part
    int owner = 0;
    at::Tensor whole = {};
    zeropage::comm::Pending pending = {};
  };

  at::Tensor part_of(const Matrix& matrix) const {
    const int64_t part = matrix.values.numel();
    return matrix.whole.narrow(0, world_.rank() * part, part);
  }

  void assign_owners() {
    const auto cost = [](const Matrix& matrix) {
      const auto less = static_cast<double>(std::min(matrix.sizes[0], matrix.sizes[1]));
      const auto more = static_cast<double>(std::max(matrix.sizes[0], matrix.sizes[1]));
      return less * less * (3 * more + less);
    };
    std::vector<Matrix*> dearest;
    for (Matrix& matrix : matrices_) dearest.push_back(&matrix);
    std::stable_sort(dearest.begin(), dearest.end(), [&](const Matrix* left, const Matrix* right) {
      return cost(*left) > cost(*right);
    });
    std::vector<double> loads(static_cast<size_t>(world_.size()));
    for (Matrix* const matrix : dearest) {
      const auto least = std::min_element(loads.begin(), loads.end());
      matrix->owner = static_cast<int>(least - loads.begin());
      *least += cost(*matrix);
    }
  }

  const World world_;
  const bool shares_;
  const MuonOptions options_{0.02};
  std::vector<Matrix> matrices_;
};

struct Contender {
  std::string name;
  std::function<void()> prepare, step;
};

template <typename Stepper>
Contender contender(std::string name, std::shared_ptr<Stepper> stepper) {
  return {std::move(name), [stepper] { stepper->prepare(); }, [stepper] { stepper->step(); }};
}

struct Figures {
  Spread seconds;          // until the last rank has made its step
  int64_t peak_bytes = 0;  // of this rank, beyond what it holds between steps
};

std::vector<Figures> measure(const Flags& flags, const World& world,
                             const std::vector<Contender>& contenders) {
  std::vector<Figures> figures(contenders.size());
  zeropage::memory::Ledger& ledger = *zeropage::memory::Ledger::current();
  for (int round = -1; round < flags.rounds; ++round) {
    for (size_t index = 0; index < contenders.size(); ++index) {
      contenders[index].prepare();
      world.communicator().barrier("before a step").wait();
      const int64_t before = ledger.now().total();
      ledger.reset_peak();
      const auto begin = std::chrono::steady_clock::now();
      contenders[index].step();
      world.communicator().barrier("after a step").wait();
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
      if (round < 0) continue;
      figures[index].seconds.rounds.push_back(taken.count());
      figures[index].peak_bytes = ledger.at_peak().total() - before;
    }
  }
  return figures;
}

std::vector<Contender> contenders_of(const Flags& flags, const World& world) {
  return {
      contender("Zeropage, AdamW", std::make_shared<Ours<torch::optim::AdamW>>(
                                       flags, world, torch::optim::AdamWOptions(1e-3))),
      contender("Zeropage, Muon", std::make_shared<Ours<Muon>>(flags, world, MuonOptions(0.02))),
      contender("all gathered, each rank transforms all",
                std::make_shared<GatheringAll>(flags, world, /*shares=*/false)),
      contender("all gathered, each rank transforms its share",
                std::make_shared<GatheringAll>(flags, world, /*shares=*/true))};
}

void print_table(const Flags& flags) {
  constexpr double kMs = 1e3;
  constexpr double kMib = 1 << 20;
  constexpr size_t kMuon = 1;
  std::printf("%ld blocks of width %ld, stage %d, milliseconds\n\n",
              static_cast<long>(flags.layers), static_cast<long>(flags.d_model), flags.stage);
  std::printf(
      "| ranks | step | median | least to most | of Zeropage's Muon | peak of rank 0, MiB "
      "|\n|---|---|---|---|---|---|\n");
  nlohmann::json rows = nlohmann::json::array();
  for (const int ranks : flags.ranks) {
    World::threads(ranks, [&](const World& world) {
      const auto contenders = contenders_of(flags, world);
      const auto figures = measure(flags, world, contenders);
      if (world.rank() != 0) return;
      for (size_t index = 0; index < contenders.size(); ++index) {
        const Spread& seconds = figures[index].seconds;
        const Spread ratio = bench::quotient(seconds, figures[kMuon].seconds);
        std::printf("| %d | %s | %.1f | %.1f to %.1f | %.2f | %.1f |\n", ranks,
                    contenders[index].name.c_str(), seconds.median() * kMs, seconds.least() * kMs,
                    seconds.most() * kMs, ratio.median(),
                    static_cast<double>(figures[index].peak_bytes) / kMib);
        rows.push_back({{"ranks", ranks},
                        {"step", contenders[index].name},
                        {"seconds", bench::spread_json(seconds)},
                        {"of_muon", bench::spread_json(ratio)},
                        {"peak_bytes", figures[index].peak_bytes}});
      }
      std::fflush(stdout);
    });
  }
  bench::write_json(flags.json, rows);
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app(
      "Times a step of Muon on sharded matrices, beside AdamW's and beside ways that gather all of "
      "them on each rank.");
  app.option_defaults()->always_capture_default();
  app.add_option("--ranks", flags.ranks, "Numbers of ranks, which are threads")->delimiter(',');
  app.add_option("--d-model", flags.d_model, "Width of a block, which has four matrices")
      ->check(CLI::Range(1, 1 << 16));
  app.add_option("--layers", flags.layers, "Blocks")->check(CLI::Range(1, 1 << 16));
  app.add_option("--stage", flags.stage, "Stage of Zeropage's")->check(CLI::Range(0, 3));
  app.add_option("--rounds", flags.rounds, "Interleaved rounds")->check(CLI::Range(1, 1 << 20));
  app.add_option("--json", flags.json, "Writes every figure to this file");
  return bench::parse_and_measure("matrix_updates", app, argc, argv, [&] { print_table(flags); });
}
