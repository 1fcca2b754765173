// One rank of this library's run of a script, between two resumptions. What it has is the whole module
// (make_whole_rank()) or some stages of it (make_pipeline_rank()). Or the module is as LibTorch made it, and its optimizer alone
// is this library's (make_alone_rank()).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/scripts/side.h"
#include "zeropage/zeropage.h"

namespace zeropage::scripts {

// Where a rank begins.
struct Begin {
  size_t action = 0;
  int pass = 0;
  std::optional<std::vector<std::string>> frozen;  // unset: as the module is made
  std::string state;                               // to load; empty: none
  std::string folder;                              // for what is on NVMe
};

class OurRank : public Side {
 public:
  void begin(const Begin& begin, const ComposedModule::Masks& masks);
  // world: all ranks.
  void save(const std::string& path, const World& world);
  Begin end(size_t action) const;
  void leave_masks(ComposedModule::Masks& masks) const;
  // What this rank saw. Ranks that are the first along the other axes have the parts of their stages.
  Observations take() { return std::move(seen_); }

 protected:
  OurRank(const Script& script, const Setting& setting, const Mesh& mesh);

  // Wraps what this rank has of the module, and makes its optimizers.
  virtual void wrap(const std::string& folder, const Begin& begin) = 0;
  virtual ModelRef model() = 0;
  virtual TrainedModule trained() = 0;
  // Whole parameters and buffers.
  virtual torch::OrderedDict<std::string, at::Tensor> values() = 0;
  virtual bool has(const torch::Tensor& parameter) const = 0;
  virtual StepReport step_all() = 0;
  // The mean loss of the open step's micro-batches; undefined where none had weight.
  virtual torch::Tensor loss() const = 0;

  // A step that nobody looks at.
  virtual void train_on() {}

  // For wrap().
  std::shared_ptr<ComposedModule> made(const Begin& begin) const;
  Options options_of(const std::string& folder) const;
  AccumulatorOptions accumulator_options() const;
  TensorParallelPlan slices() const;

  template <typename Model>
  void make_optimizers(Model& model) {
    for (const auto& groups : groups_of_optimizers()) {
      optimizers_.push_back(with_rule(script_.rule, [&]<typename A>(A*, const auto& options) {
        return std::unique_ptr<torch::optim::Optimizer>(
            std::make_unique<Optimizer<A>>(model, groups, options));
      }));
    }
  }

  std::vector<ShardedOptimizer::Groups> groups_of_optimizers() const;
  ShardedOptimizer& sharded() { return dynamic_cast<ShardedOptimizer&>(*optimizers_.front()); }

  // Among those that have samples of their own.
  int rank() const {
    const int of_data = mesh_["data"].rank();
    return setting_.expert == 1 ? of_data : of_data * setting_.expert + mesh_["expert"].rank();
  }
  // What this rank is given: where others have some of the rows, its own.
  Sample sample(uint64_t seed, int number) const;
  // What all ranks have of it together.
  torch::Tensor of_all_rows(const torch::Tensor& own) const;
  // Under what the setting says about activations.
  torch::Tensor forward_under(const std::function<torch::Tensor()>& forward);
  torch::Tensor loss_of(const torch::Tensor& outputs, const Sample& sample) const;
  torch::Tensor of_dtype(const torch::Tensor& values) const;

  const Mesh mesh_;

 private:
  void make_policy(const std::string& folder);

  void accumulated_step() override;
  void look_at_mean() override {}
  double clip(double most, bool by_torch) override;
  void write_guarded(torch::Tensor parameter, double factor) override;
  void write_alike(torch::Tensor parameter, double factor) override;
  void see_values() override;
  void average() override { average_->update(); }
  torch::Tensor evaluate_average() override;
  double share_of_own_value() const override { return 1 + rank(); }
  bool is_odd_one() const override {
    return setting_.shares() > 1 && rank() + 1 == setting_.shares();
  }
  void update_balance() override;

  ComposedModule::Masks masks_;
  std::unique_ptr<checkpointing::ActivationPolicy> policy_;  // null: none
  std::optional<WeightAverage> average_;
};

std::unique_ptr<OurRank> make_whole_rank(const Script& script, const Setting& setting,
                                         const Mesh& mesh);
std::unique_ptr<OurRank> make_alone_rank(const Script& script, const Setting& setting,
                                         const Mesh& mesh);
std::unique_ptr<OurRank> make_pipeline_rank(const Script& script, const Setting& setting,
                                            const Mesh& mesh);

}  // namespace zeropage::scripts
