// State and weights of a run to disk and back: `save_state`, `load_state`, `StateSaver`, `save_weights`; weights of any format:
// `WeightsSource`.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/serialize/archive.h>

#include "zeropage/detail/model_ref.h"
#include "zeropage/distributed_data_parallel.h"
#include "zeropage/optimizer.h"
#include "zeropage/saved_state.h"
#include "zeropage/world.h"

// What a script's own object, such as a schedule that is no LRScheduler, keeps in a state.
//
//   run.extras["schedule"] = {[&] { return std::to_string(schedule.step); },
//                             [&](const std::string& text) { schedule.step = std::stol(text); }};
//   run.extras["sampler"] = zeropage::RunExtra::of(sampler);  // that has save(archive), load(archive)
//
// The objects outlive the saves and loads that name them. Threads: called on the training thread.

namespace zeropage {

struct RunExtra {
  // What is to be kept, alike on all ranks: UTF-8 text of any length, such as JSON or numbers. Called by a
  // save, between steps. What it throws, all ranks throw, and nothing is saved.
  std::function<std::string()> save = {};
  // Takes it back. Called by a load, when the model has its values.
  std::function<void(const std::string&)> load = {};

  // An extra that saves an object with void save(torch::serialize::OutputArchive&) const and
  // void load(torch::serialize::InputArchive&), as LibTorch's classes have them. Kept as JSON: numbers,
  // booleans, text and lists of them; throws for tensors, and for archives within the archive.
  template <typename T>
  static RunExtra of(T& object) {
    return of_archive([&object](torch::serialize::OutputArchive& to) { object.save(to); },
                      [&object](torch::serialize::InputArchive& from) { object.load(from); });
  }
  static RunExtra of_archive(std::function<void(torch::serialize::OutputArchive&)> save,
                             std::function<void(torch::serialize::InputArchive&)> load);
};

// Weights from a safetensors file into a plain module of one process, without a world: for inference, tests,
// or a start from what others trained.
//
//   Gpt gpt(config);
//   zeropage::load_weights("gpt2/model.safetensors", gpt);
//   zeropage::load_weights("run", gpt);  // of a saved run: what its `latest` names
//
// A module that DistributedDataParallel has wrapped takes the same files by the other load_weights(), straight into what each
// rank owns:
//
//   zeropage::load_weights("gpt2/model.safetensors", model);
//
// Files of other formats: WeightsSource, below.
// Memory: the file's largest tensor. Threads: any. Throws state::StateError for what is wrong with a file or does not
// fit, with all names; nothing of the module has changed then, unless a file cannot be read to its end.
struct ModuleLoadOptions {
  // true: the file must have every parameter and buffer, and nothing else. false: what is there is loaded, and the
  // report says what was missing. A different shape, or floating point for whole numbers, is an error in both
  // cases.
  bool strict = true;
  // The module's names -> names in the file; others are as they are.
  std::map<std::string, std::string> names = {};
  // Text in front of every name in the file, also of those in `names`: "model.". Names without it are not the
  // module's, so they are unexpected.
  std::string prefix = {};
};

struct ModuleLoadReport {
  std::vector<std::string> missing = {};     // of the module, not in the file
  std::vector<std::string> unexpected = {};  // in the file, not of the module
};

// path: a safetensors file; an index of several (model.safetensors.index.json), as Hugging Face's
// save_pretrained() writes it, beside them; a saved state, or a run's folder, whose checksums are looked at.
// Values are converted to the module's dtypes and go to the devices where its tensors are, which stay the
// same tensors. A tied parameter is found under any of its names, in the file's metadata too
// (safetensors.torch.save_model).
ModuleLoadReport load_weights(const std::filesystem::path& path, torch::nn::Module& module,
                              const ModuleLoadOptions& options = {});

template <typename Impl>
ModuleLoadReport load_weights(const std::filesystem::path& path,
                              const torch::nn::ModuleHolder<Impl>& module,
                              const ModuleLoadOptions& options = {}) {
  return load_weights(path, static_cast<torch::nn::Module&>(*module.ptr()), options);
}

template <typename M>
requires std::is_base_of_v<torch::nn::Module, M> ModuleLoadReport
load_weights(const std::filesystem::path& path, const std::shared_ptr<M>& module,
             const ModuleLoadOptions& options = {}) {
  return load_weights(path, static_cast<torch::nn::Module&>(*module), options);
}

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
// The same training state gives the same bytes, whatever it is sharded over (saving/STATE_FORMAT.md). Each
// rank writes its own part of the same files, and nothing is gathered. A kill at any moment leaves
// the state before or the new one; `latest` beside it is replaced in one piece.
//
// Collective. Between steps: gradients are not part of a state.
// Memory: saving 13 MiB of buffers a rank; loading 1 MiB, as much for each state that the optimizer keeps of a parameter, and
// with 8-bit states fp32 of a page's. What is
// offloaded to disk is read page by page.
// Throws state::StateError, on all ranks alike: which file, where, what was expected and what is there;
// c10::Error where the model cannot be saved. Threads: the training thread.

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
  // The user's objects, by name. A save asks each for its text, and a load gives it back.
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
  std::filesystem::path directory = {};
  int64_t step = 0;
  int64_t bytes = 0;          // of all files
  int64_t bytes_of_rank = 0;  // that this rank wrote
  double seconds = 0;
  std::vector<std::string> notes = {};  // what was found and done beside; on rank 0
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
  std::filesystem::path directory = {};
  int64_t step = 0;
  std::vector<std::string> missing =
      {};  // of the model, the optimizer or the run, not in the state
  std::vector<std::string> unexpected = {};  // in the state, and of neither
  // Whether the generators of random numbers continue those of the state.
  bool random_goes_on = false;
  std::vector<std::string> notes = {};  // such as newer states that were refused, and why
};

// path: a state, or a run's folder: what its `latest` names. run: takes over step, samples and values,
// and gives its accumulator, scheduler and extras theirs.
LoadReport load_state(const std::filesystem::path& path, const TrainedModule& model,
                      ShardedOptimizer& optimizer, RunState& run, const LoadOptions& options = {});
LoadReport load_state(const std::filesystem::path& path, const TrainedModule& model,
                      ShardedOptimizer& optimizer, const LoadOptions& options = {});
// Weights and buffers of any state, or of a safetensors file or an index of several, whoever wrote them, as the plain
// module's load_weights() above takes them. Each rank reads what it owns. Master weights take over the most exact values that
// there are. A plain file has no checksums, so verify_first, fall_back and the optimizer's options are not read.
LoadReport load_weights(const std::filesystem::path& path, const DistributedDataParallelBase& model,
                        const LoadOptions& options = {});
LoadReport load_weights(const std::filesystem::path& path, const TrainedModule& model,
                        const ShardedOptimizer& optimizer, const LoadOptions& options = {});

// Saves a run's state again and again beside its training: a step waits for a copy of what this rank
// owns, and a thread writes it while training goes on.
//
//   zeropage::check_can_save("run", model, optimizer);  // before hours of training, not after
//   zeropage::StateSaver saver("run", model.all_ranks(), {.keep_last = 3});
//   for (...) {
//     ...
//     if (step % 1000 == 0) saver.save(model, optimizer, {.step = step});
//   }
//   saver.wait();
//
// From its construction on the folder belongs to this run. If a newer run has made a saver for the folder since (a
// job was started again while ranks of its former start live), the next save throws and removes nothing. So make
// the saver before load_state(), and one saver for a folder.
//
// A step that is older than the newest whole state from before the saver is refused: keep_last would remove it at once. So a
// new run takes a folder of its own, and one that goes back to an older state moves the newer ones away.
//
// One save at a time: the next one waits for it. An error of a save is thrown by the next save() or
// wait(), on all ranks alike; the states before are as they were, and training may go on.
//
// Memory: what this rank writes (at fp32 and Adam 12 bytes a parameter it owns), on the host, from the
// first asynchronous save to the end of the saver; Kind::kStaging on the ledger.
// Collective: all but the destructor. Threads: the training thread.
struct StateSaverOptions {
  // The newest keep_last states stay, and those whose step is a multiple of keep_every; older ones are removed once
  // a new one is whole. keep_last 0: all stay. keep_every 0: none beside the newest.
  int64_t keep_last = 0;
  int64_t keep_every = 0;
  // false: save() returns when the state is on the disk, and needs no memory for a copy.
  bool asynchronous = true;
  // SIGTERM and SIGINT (Ctrl-C) no longer end the process, but make stop_requested() true. A second SIGINT ends it at
  // once. A signal that the process ignored when the saver was made is ignored still.
  bool on_signal = false;
  SaveOptions save = {};
};

class StateSaver {
 public:
  // folder: of the run, made where it is not there; states are step-N in it, and `latest` names the newest. world: the
  // model's all_ranks(), or that of an optimizer alone.
  StateSaver(std::filesystem::path folder, const comm::World& world,
             const StateSaverOptions& options = {});
  // Waits for the last save. Without a wait() before, its error is only a line on stderr.
  ~StateSaver();

  // Saves the state as it is now. Returns the seconds for which training stood still.
  double save(const TrainedModule& model, ShardedOptimizer& optimizer, const RunState& run = {});
  // Waits until the last save is on the disk.
  void wait();
  // Whether a state is being written. Not collective: ranks end at different times.
  bool is_saving() const;
  // The report of the last save that ended.
  const std::optional<SavedReport>& last() const;

  // Whether any rank got SIGTERM or SIGINT: save, and end. Costs a reduction of one number.
  bool stop_requested() const { return stop_signal() != 0; }
  // Which of them: SIGTERM, SIGINT, or 0 for neither. The same on all ranks, SIGTERM where ranks got both. Costs the same.
  int stop_signal() const;

 private:
  class Saves;

  const std::unique_ptr<Saves> saves_;
};

// `WeightsSource`: whole tensors by name, from any kind of file, into a plain module or into the shards of a wrapped one.
//
//   const auto source = zeropage::open_weights("model.safetensors.index.json");
//   zeropage::DeferredModule<Gpt> deferred([&] { return Gpt(config); });
//   zeropage::DistributedDataParallel<Gpt> model(std::move(deferred), world, {.stage = zeropage::Stage::kParameters});
//   zeropage::load_weights(*source, model);
//
// Each rank reads what it owns, in pieces of 1 MiB. So with a DeferredModule no rank ever holds the model.
// A program that has weights in a format of its own derives from WeightsSource and needs nothing else.
//
// Threads: one at a time; each rank has its own.
class WeightsSource {
 public:
  struct Entry {
    std::string name;
    std::vector<int64_t> sizes;  // of the whole tensor; empty: a scalar
    at::ScalarType dtype = at::kFloat;
  };

  virtual ~WeightsSource() = default;

  // What errors call it: the file's path.
  virtual std::string name() const = 0;
  // All tensors, each name once. The same until the end of the source.
  virtual const std::vector<Entry>& tensors() const = 0;
  // Further names of tensors in tensors(), such as those of tied weights.
  virtual std::map<std::string, std::string> aliases() const { return {}; }
  // Writes the elements from `first` on, in row-major order of the whole tensor, to all of `to`: flat and contiguous,
  // on the host, in the entry's dtype, within the tensor. entry: one of tensors(). Throws where they cannot be read.
  virtual void read(const Entry& entry, int64_t first, const at::Tensor& to) = 0;
};

// path: what load_weights() takes for a plain module. Throws state::StateError.
std::unique_ptr<WeightsSource> open_weights(const std::filesystem::path& path);

// Into a plain module of one process. Throws as load_weights() by a path does. Memory: the largest tensor.
ModuleLoadReport load_weights(WeightsSource& source, torch::nn::Module& module,
                              const ModuleLoadOptions& options = {});

// Into what this rank owns of a wrapped module, at any stage, tier and precision. Master weights take the source's values
// before they are rounded. Of the options strict, names, prefix and deadline are read.
//
// Before anything is written, ranks compare what their sources have. What is missing, unexpected or of another shape is one
// error with all names. An error while values are read leaves the model half loaded, and says so.
// Throws state::StateError on all ranks alike. Collective. Threads: the training thread. Memory: pieces of 1 MiB.
LoadReport load_weights(WeightsSource& source, const DistributedDataParallelBase& model,
                        const LoadOptions& options = {});
// The same where an optimizer alone shards a plain module.
LoadReport load_weights(WeightsSource& source, const TrainedModule& model,
                        const ShardedOptimizer& optimizer, const LoadOptions& options = {});

}  // namespace zeropage
