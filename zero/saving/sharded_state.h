// Training state on disk. A run that was killed continues with the same bits, at any stage, number of ranks, tier
// and page size, without a converter; its weights are safetensors that other programs read.
//
//   zeropage::save_state("run/step-1000", model, optimizer);
//   ...
//   zeropage::load_state("run", model, optimizer);  // what `latest` names
//
// model: a DistributedDataParallel, or the plain module that an Optimizer without one steps. Of a plain module, parameters that
// the optimizer was not given are saved and loaded as buffers are: by rank 0, and by all ranks.
//
// The same training state gives the same bytes, whatever it is sharded over (zero/saving/STATE_FORMAT.md). Each
// rank writes its own part of the same files, and nothing is gathered. A kill at any moment leaves
// the state before or the new one; `latest` beside it is replaced in one piece.
//
// Collective. Between steps: gradients are not part of a state.
// Memory: saving 13 MiB of buffers a rank; loading 1 MiB, as much for each state that the optimizer keeps of a parameter, and
// with 8-bit states fp32 of a page's. What is
// offloaded to disk is read page by page.
// Throws state::StateError, on all ranks alike: which file, where, what was expected and what is there;
// c10::Error where the model cannot be saved. Threads: the training thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <torch/optim/schedulers/lr_scheduler.h>

#include "state/state_error.h"
#include "zero/distributed_data_parallel.h"
#include "zero/model_ref.h"
#include "zero/saving/run_extra.h"
#include "zero/sharded_optimizer.h"

namespace zeropage {

class Accumulator;
class WeightAverage;

// What a run continues from, beside the model and its optimizer. The same on all ranks.
struct RunState {
  // Training steps so far, those that were skipped included. 0: the optimizer's.
  int64_t step = 0;
  // Samples that were trained on so far, or another number that says where the loader continues.
  int64_t samples = 0;
  // Its loss scaler and norm spikes. Null: none are kept.
  Accumulator* accumulator = nullptr;
  // Saved beside the optimizer's state, in fp32; 4 bytes a parameter of the file. Null: none is kept. Not while it is
  // swapped in.
  WeightAverage* average = nullptr;
  // Its number of steps; learning rates are in the optimizer's groups. Null: none is kept.
  torch::optim::LRScheduler* scheduler = nullptr;
  // The user's own.
  std::map<std::string, std::string> values = {};
  // The user's objects, by name (zero/saving/run_extra.h). A save asks each for its text, and a load gives it back.
  // A load is refused before anything changes if the state has other names (LoadOptions::strict).
  std::map<std::string, RunExtra> extras = {};
};

// The dtype in which parameters and buffers are saved.
enum class WeightsAs : uint8_t {
  kInModule,  // theirs in the module
  // bf16 and fp16 in fp32: parameters as their fp32 master weights, where there are any. Costs fp32 of what
  // a rank owns of a page while it saves.
  kFp32,
  // RunState::average instead of the parameters, in fp32 as kFp32; buffers are the model's.
  kAverage,
};

struct SaveOptions {
  bool update_latest = true;
  // Writes past the page cache, if the file system can: at the disk's full speed, and nothing else leaves the
  // cache.
  bool direct_io = true;
  // How long ranks wait for the slowest one's disk. They notice a lost rank at once.
  std::chrono::milliseconds deadline = std::chrono::minutes(10);
  // These two are for save_weights() alone; save_state() refuses other values. prefix: in front of every name, such
  // as "model." for those who hold the module as a member of that name; default: nothing.
  WeightsAs weights_as = WeightsAs::kInModule;
  std::string prefix = {};
};

struct SavedReport {
  std::filesystem::path directory;
  int64_t step = 0;
  int64_t bytes = 0;          // of all files
  int64_t bytes_of_rank = 0;  // that this rank wrote
  double seconds = 0;
  std::vector<std::string> notes;  // what was found and done beside; on rank 0
};

// directory: of this state, such as run/step-1000. A state that is already there is kept until the new one is
// whole.
SavedReport save_state(const std::filesystem::path& directory, const TrainedModule& model,
                       ShardedOptimizer& optimizer, const RunState& run = {},
                       const SaveOptions& options = {});
// Weights and buffers alone, also in fp32 or under other names (SaveOptions).
SavedReport save_weights(const std::filesystem::path& directory,
                         const DistributedDataParallelBase& model, const RunState& run = {},
                         const SaveOptions& options = {});
SavedReport save_weights(const std::filesystem::path& directory, const TrainedModule& model,
                         const ShardedOptimizer& optimizer, const RunState& run = {},
                         const SaveOptions& options = {});

// Before the first step of a run: throws what its first save would throw for want of a folder, on all
// ranks alike. Makes `folder`, in which states are to lie (run, of run/step-1000), and lets each rank
// write 4 KiB there and remove them. Throws state::StateError where that fails on any rank, and where
// its file system has less room than one more state takes: weights, buffers, and the optimizer's states,
// those that it is yet to make included where its class tells them (all but RMSprop and classes of
// yours). Room for the older states that a StateSaver keeps is not looked at.
// Costs the messages of a save; between steps. Collective.
void check_can_save(const std::filesystem::path& folder, const TrainedModule& model,
                    ShardedOptimizer& optimizer, const SaveOptions& options = {});

struct LoadOptions {
  // true: every parameter, buffer and state must be there, in its shape, and nothing else. false: what is there is
  // loaded, and the report says what was missing. A different shape is an error in both cases.
  bool strict = true;
  // The model's names -> names in the state; others are as they are.
  std::map<std::string, std::string> names = {};
  // If the state is damaged, loads the newest one before it that is not. Reads everything once more.
  bool fall_back = false;
  // Checks every block's checksum before anything of the model changes; ranks share the work. Otherwise a block
  // that turns out to be damaged leaves the model half loaded, and the error says so.
  bool verify_first = true;
  // Takes learning rates and other options of the optimizer's groups from the state: a group gets those that its
  // parameters had. Otherwise LoadReport::notes says which options of the state differ.
  bool optimizer_options = true;
  // This rank's generators of random numbers (LibTorch's default ones of the host and the device) continue those at
  // its place on the mesh, by the names of the axes and not by their order. If an axis has another size, they
  // continue only if generators were alike along it in the state and are alike now; otherwise those of all ranks
  // stay as they are, and LoadReport::notes says why.
  bool random = true;
  std::chrono::milliseconds deadline = std::chrono::minutes(10);
  // Text in front of every name in the state, also of those in `names`: "model.". Names without it are not the
  // model's, so they are unexpected.
  std::string prefix = {};
};

struct LoadReport {
  std::filesystem::path directory;
  int64_t step = 0;
  std::vector<std::string> missing;     // of the model, the optimizer or the run, not in the state
  std::vector<std::string> unexpected;  // in the state, and of neither
  // Whether the generators of random numbers continue those of the state.
  bool random_goes_on = false;
  std::vector<std::string> notes;  // such as newer states that were refused, and why
};

// path: a state, or a run's folder: what its `latest` names. run: takes over step, samples and values,
// and gives its accumulator, scheduler and extras theirs.
LoadReport load_state(const std::filesystem::path& path, const TrainedModule& model,
                      ShardedOptimizer& optimizer, RunState& run, const LoadOptions& options = {});
LoadReport load_state(const std::filesystem::path& path, const TrainedModule& model,
                      ShardedOptimizer& optimizer, const LoadOptions& options = {});
// Weights and buffers of any state; zero/saving/module_weights.h has those of any safetensors file, for a
// module without ranks. Master weights take over the most exact values that it has.
LoadReport load_weights(const std::filesystem::path& path, const DistributedDataParallelBase& model,
                        const LoadOptions& options = {});
LoadReport load_weights(const std::filesystem::path& path, const TrainedModule& model,
                        const ShardedOptimizer& optimizer, const LoadOptions& options = {});

}  // namespace zeropage
