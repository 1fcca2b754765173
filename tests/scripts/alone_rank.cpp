#include <optional>

#include "tests/scripts/our_rank.h"

namespace zeropage::scripts {
namespace {

class AloneRank final : public OurRank {
 public:
  AloneRank(const Script& script, const Setting& setting, const Mesh& mesh)
      : OurRank(script, setting, mesh) {}

 private:
  void wrap(const std::string& folder, const Begin& begin) override {
    module_ = made(begin);
    Options options = options_of(folder);
    // The module is in its dtype already.
    options.compute_dtype.reset();
    const auto groups = groups_of_optimizers().front();
    optimizers_.push_back(with_rule(script_.rule, [&]<typename A>(A*, const auto& of_class) {
      return std::unique_ptr<torch::optim::Optimizer>(
          std::make_unique<Optimizer<A>>(groups, mesh_["data"], of_class, options));
    }));
    if (script_.accumulation.is_on) accumulator_.emplace(sharded(), accumulator_options());
  }
  ModelRef model() override { return sharded(); }
  TrainedModule trained() override { return *module_; }
  torch::OrderedDict<std::string, at::Tensor> values() override {
    auto all = module_->named_parameters();
    all.update(module_->named_buffers());
    return all;
  }
  bool has(const torch::Tensor& /*parameter*/) const override { return true; }

  torch::Tensor forward(const Sample& sample, int units) {
    return forward_under(
        [&] { return module_->forward(of_dtype(sample.x), sample.words, units, pass_, rank()); });
  }

  void backward(const Action& action, bool syncs) override {
    if (!syncs) {
      const NoSync no_sync = sharded().no_sync();
      return backward(action, /*syncs=*/true);
    }
    const Sample sample = sample_of(script_.seed, pass_, rank());
    const torch::Tensor loss = loss_of(forward(sample, units_of(action)), sample) * action.value;
    if (!loss.requires_grad()) return;
    if (action.does == Does::kBackwardTwice) loss.backward({}, /*keep_graph=*/true);
    loss.backward();
  }

  void micro_batches(int count, int units) override {
    if (accumulator_->micro_step() == 0) accumulator_->set_micro_steps(micro_batches_ahead());
    for (int micro_batch = 0; micro_batch < count; ++micro_batch, ++pass_) {
      const Sample sample = sample_of(script_.seed, pass_, rank());
      torch::Tensor loss = loss_of(forward(sample, units), sample) * factor_of(pass_, rank());
      if (!loss.requires_grad()) loss = loss.detach().requires_grad_(true);
      accumulator_->backward(loss, weight_of(pass_, rank()));
    }
  }
  StepReport step_all() override { return accumulator_->step(*optimizers_[0]); }
  torch::Tensor loss() const override { return accumulator_->loss(); }
  void abandon() override { accumulator_->abandon(); }

  void throw_in_forward(int unit) override {
    module_->throw_behind(unit);
    try {
      forward(sample_of(script_.seed, pass_, rank()), static_cast<int>(script_.units.size()));
    } catch (const std::runtime_error& error) {
      if (std::string(error.what()) != "thrown on purpose") throw;
    }
  }

  torch::Tensor evaluate() override {
    const torch::NoGradGuard no_grad;
    module_->eval();
    const torch::Tensor outputs =
        forward(sample_of(script_.seed + 1, pass_, 0), static_cast<int>(script_.units.size()));
    module_->train();
    return outputs;
  }

  std::optional<Accumulator> accumulator_;
};

}  // namespace

std::unique_ptr<OurRank> make_alone_rank(const Script& script, const Setting& setting,
                                         const Mesh& mesh) {
  return std::make_unique<AloneRank>(script, setting, mesh);
}

}  // namespace zeropage::scripts
