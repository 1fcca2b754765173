#include "tests/scripts/loop_rank.h"
#include "zeropage/expert_parallel.h"
#include "zeropage/tensor_parallel.h"

namespace zeropage::scripts {
namespace {

class AloneRank final : public LoopRank {
 public:
  AloneRank(const Script& script, const Setting& setting, const Mesh& mesh)
      : LoopRank(script, setting, mesh) {}

 private:
  void wrap(const std::string& folder, const Begin& begin) override {
    module_ = made(begin);
    if (setting_.expert > 1) expert_parallel(*module_, mesh_);
    Options options = options_of(folder);
    // The module is in its dtype already.
    options.compute_dtype.reset();
    const auto groups = groups_of_optimizers().front();
    optimizers_.push_back(with_rule(script_.rule, [&]<typename A>(A*, const auto& of_class) {
      return std::unique_ptr<torch::optim::Optimizer>(std::make_unique<Optimizer<A>>(
          groups, setting_.expert > 1 ? mesh_.world() : mesh_["data"], of_class, options));
    }));
    make_accumulator();
  }
  ModelRef model() override { return sharded(); }
  TrainedModule trained() override { return *module_; }
  torch::OrderedDict<std::string, at::Tensor> values() override {
    torch::OrderedDict<std::string, at::Tensor> all;
    for (const auto& item : module_->named_parameters()) {
      all.insert(item.key(), setting_.expert > 1 ? whole_of(item.value()) : item.value());
    }
    all.update(module_->named_buffers());
    return all;
  }
  bool has(const torch::Tensor& /*parameter*/) const override { return true; }
  torch::Tensor outputs(const Sample& sample, int units) override {
    return module_->forward(of_dtype(sample.x), sample.words, units, pass_, rank());
  }
  NoSync no_sync() override { return sharded().no_sync(); }
  void set_training(bool is_on) override { module_->train(is_on); }
};

}  // namespace

std::unique_ptr<OurRank> make_alone_rank(const Script& script, const Setting& setting,
                                         const Mesh& mesh) {
  return std::make_unique<AloneRank>(script, setting, mesh);
}

}  // namespace zeropage::scripts
