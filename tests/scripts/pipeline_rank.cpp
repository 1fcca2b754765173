#include <optional>
#include <unordered_set>

#include "tests/scripts/our_rank.h"
#include "zeropage/pipeline.h"

namespace zeropage::scripts {
namespace {

torch::Tensor packed(const Sample& sample, int pass) {
  return ComposedModule::packed(sample.x, sample.words, pass);
}

PipelineLayers layers_of_units(const std::shared_ptr<ComposedModule>& module, int units) {
  PipelineLayers layers;
  for (int unit = 0; unit < units; ++unit) {
    const auto forward = [module, unit](const torch::Tensor& input) {
      return module->forward_packed(unit, input);
    };
    layers.push_back(
        {"u" + std::to_string(unit), module->modules_of(unit), forward, module->tensors_of(unit)});
  }
  return layers;
}

class PipelineRank final : public OurRank {
 public:
  PipelineRank(const Script& script, const Setting& setting, const Mesh& mesh)
      : OurRank(script, setting, mesh) {}

 private:
  void wrap(const std::string& folder, const Begin& begin) override {
    const int units = static_cast<int>(script_.units.size());
    std::vector<int64_t> first = first_units_of(script_, setting_);
    first.pop_back();
    const PipelineStageOptions options{.chunks = setting_.chunks, .first_layers = first};
    std::shared_ptr<PipelineStage> stage;
    if (setting_.is_deferred) {
      stage = pipeline_stage<std::shared_ptr<ComposedModule>>(
          [&] { return made(begin); },
          [&](std::shared_ptr<ComposedModule>& module) {
            module_ = module;
            return layers_of_units(module, units);
          },
          mesh_["pipeline"], options);
    } else {
      module_ = made(begin);
      stage = std::make_shared<PipelineStage>(module_, layers_of_units(module_, units),
                                              mesh_["pipeline"], options, /*tape=*/nullptr);
    }
    for (const torch::Tensor& parameter : stage->parameters()) {
      own_.insert(parameter.unsafeGetTensorImpl());
    }
    if (setting_.tensor > 1) tensor_parallel(*stage, mesh_["tensor"], slices_of(*stage));
    model_.emplace(stage, mesh_, options_of(folder));
    make_optimizers(*model_);
  }

  // Those of the layers that this rank has.
  TensorParallelPlan slices_of(const PipelineStage& stage) const {
    TensorParallelPlan own;
    const auto children = stage.named_children();
    for (const auto& planned : slices()) {
      if (children.contains(planned.first)) own.push_back(planned);
    }
    return own;
  }

  ModelRef model() override { return *model_; }
  TrainedModule trained() override { return *model_; }
  torch::OrderedDict<std::string, at::Tensor> values() override { return full_state(*model_); }
  bool has(const torch::Tensor& parameter) const override {
    return own_.contains(parameter.unsafeGetTensorImpl());
  }

  // The pipeline for so many micro-batches; another one where the count is another.
  Pipeline& pipeline(int count) {
    if (pipeline_ && pipeline_->micro_batches() == count) return *pipeline_;
    AccumulatorOptions accumulator = accumulator_options();
    accumulator.micro_steps = count;
    std::optional<accumulate::LossScaler> scaler;
    if (pipeline_) scaler = pipeline_->accumulator().loss_scaler();
    pipeline_.reset();
    pipeline_.emplace(*model_, PipelineOptions{.schedule = setting_.order,
                                               .accumulator = accumulator,
                                               .run_forward = [this](const auto& forward) {
                                                 return forward_under(forward);
                                               }});
    // It is the run's, which goes on.
    if (scaler) pipeline_->accumulator().loss_scaler() = *scaler;
    return *pipeline_;
  }

  void micro_batches(int count, int /*units*/) override {
    std::vector<torch::Tensor> inputs;
    std::vector<double> weights;
    for (int index = 0; index < count; ++index) {
      const int pass = pass_ + index;
      inputs.push_back(of_dtype(packed(sample_of(script_.seed, pass, rank()), pass)));
      weights.push_back(weight_of(pass, rank()));
    }
    const auto loss = [&](const torch::Tensor& output, int64_t micro_batch) {
      const int pass = pass_ + static_cast<int>(micro_batch);
      const Sample sample = sample_of(script_.seed, pass, rank());
      return loss_of(ComposedModule::activations_of(output), sample) * factor_of(pass, rank());
    };
    pipeline(count).run(inputs, loss, weights);
    pass_ += count;
  }
  StepReport step_all() override { return pipeline_->accumulator().step(*optimizers_.front()); }
  torch::Tensor loss() const override {
    const torch::Tensor loss = pipeline_->loss();
    return loss.isnan().item<bool>() ? torch::Tensor() : loss;
  }
  void abandon() override {
    if (pipeline_) pipeline_->accumulator().abandon();
  }

  bool backward(const Action& /*action*/, bool /*syncs*/) override {
    throw std::logic_error("a pipeline has no other backward than run()");
  }
  void throw_in_forward(int /*unit*/) override {
    throw std::logic_error("what a forward has changed in a pipeline before it threw nobody says");
  }

  torch::Tensor evaluate() override {
    torch::Tensor outputs;
    const int least = setting_.pipeline * setting_.chunks;
    Pipeline& with = pipeline_ ? *pipeline_ : pipeline(least);
    model_->eval();
    with.evaluate({of_dtype(packed(sample_of(script_.seed + 1, pass_, 0), pass_))}, 1,
                  [&](const torch::Tensor& output, int64_t) {
                    outputs = ComposedModule::activations_of(output);
                  });
    model_->train();
    return outputs;
  }

  std::optional<Pipeline::Model> model_;
  std::optional<Pipeline> pipeline_;  // of as many micro-batches as the last run
  std::unordered_set<const at::TensorImpl*> own_;
};

}  // namespace

std::unique_ptr<OurRank> make_pipeline_rank(const Script& script, const Setting& setting,
                                            const Mesh& mesh) {
  return std::make_unique<PipelineRank>(script, setting, mesh);
}

}  // namespace zeropage::scripts
