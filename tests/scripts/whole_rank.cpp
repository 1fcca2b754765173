#include <optional>
#include <string>

#include "tests/scripts/loop_rank.h"
#include "zeropage/context_parallel.h"
#include "zeropage/expert_parallel.h"

namespace zeropage::scripts {
namespace {

class WholeRank final : public LoopRank {
 public:
  WholeRank(const Script& script, const Setting& setting, const Mesh& mesh)
      : LoopRank(script, setting, mesh) {}

 private:
  void wrap(const std::string& folder, const Begin& begin) override {
    module_ = made(begin);
    const Options options = options_of(folder);
    if (setting_.tensor > 1) tensor_parallel(*module_, mesh_["tensor"], slices());
    if (setting_.context > 1) {
      parallel::context_parallel(
          *module_, mesh_["context"],
          setting_.is_by_heads ? parallel::ContextForm::kUlysses : parallel::ContextForm::kRing);
    }
    if (setting_.expert > 1) expert_parallel(*module_, mesh_);
    if (setting_.tensor > 1 || setting_.context > 1 || setting_.expert > 1) {
      model_.emplace(module_, mesh_, options);
    } else {
      model_.emplace(module_, mesh_["data"], options);
    }
    make_optimizers(*model_);
    make_accumulator();
    folder_ = folder;
  }
  void after_zero_grad() override {
    if (!setting_.parks) return;
    try {
      model_->park(Tier::kNvme, folder_);
    } catch (const c10::Error& error) {
      // Within an accumulation, or where a backward has begun the step.
      if (memory::message_of(error).find("for the time between two steps") == std::string::npos) {
        throw;
      }
      return;
    }
    model_->resume();
  }
  ModelRef model() override { return *model_; }
  TrainedModule trained() override { return *model_; }
  torch::OrderedDict<std::string, at::Tensor> values() override { return full_state(*model_); }
  bool has(const torch::Tensor& /*parameter*/) const override { return true; }
  torch::Tensor outputs(const Sample& sample, int units) override {
    return (*model_)(of_dtype(sample.x), sample.words, units, pass_, rank());
  }
  NoSync no_sync() override { return model_->no_sync(); }
  void set_training(bool is_on) override { model_->train(is_on); }

  std::optional<DistributedDataParallel<std::shared_ptr<ComposedModule>>> model_;
  std::string folder_;
};

}  // namespace

std::unique_ptr<OurRank> make_whole_rank(const Script& script, const Setting& setting,
                                         const Mesh& mesh) {
  return std::make_unique<WholeRank>(script, setting, mesh);
}

}  // namespace zeropage::scripts
