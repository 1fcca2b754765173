// The module of a script: its units one after the other, each x + 0.5 tanh(unit(x)), so that values and
// gradients stay near 1 whatever is composed.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "tests/scripts/expert_unit.h"
#include "tests/scripts/script.h"

namespace zeropage::scripts {

constexpr int64_t kWidth = 16;
constexpr int64_t kWords = 5;  // of embeddings
constexpr int64_t kBatch = 4;

struct Sample {
  torch::Tensor x;       // [kBatch, kWidth]
  torch::Tensor words;   // [kBatch], below kWords
  torch::Tensor target;  // [kBatch, kWidth]
};
// What a rank of `data` is given, in double.
Sample sample_of(uint64_t seed, int pass, int rank);

class ComposedModule : public torch::nn::Module {
 public:
  // By rank of `data`: what it draws masks from. Of a tensor-parallel group all draw alike.
  using Masks = std::vector<at::Generator>;
  static Masks masks_of(uint64_t seed, int ranks);

  // Values come from the seed, whatever LibTorch's generator is at.
  ComposedModule(const std::vector<Unit>& units, uint64_t seed, Masks masks);

  // last: units that are used. pass: which of the forwards, alike on all ranks. rank: whose masks are drawn.
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& words, int last, int pass,
                        int rank);

  // What passes from unit to unit of a pipeline: [kBatch, kWidth + 2], the activations, and columns that no unit changes,
  // of words and of whether the pass is odd.
  static torch::Tensor packed(const torch::Tensor& x, const torch::Tensor& words, int pass);
  static torch::Tensor activations_of(const torch::Tensor& packed);
  torch::Tensor forward_packed(int unit, const torch::Tensor& packed);
  // forward() runs the units so, too: other strides have other bits.
  void set_packs() { packs_ = true; }
  // What the unit registered, with the parts of the one that it is of.
  std::vector<std::shared_ptr<torch::nn::Module>> modules_of(int unit) const;
  std::vector<torch::Tensor> tensors_of(int unit) const;  // beside its modules'

  // LibTorch's operators in place of the fused ones.
  void use_plain_operators() { is_plain_ = true; }

  // Experts' losses of balance since the last call; undefined where there are no such units.
  torch::Tensor auxiliary_loss();
  std::vector<std::shared_ptr<ExpertUnit>>& experts() { return experts_; }

  // Behind that unit forward throws std::runtime_error("thrown on purpose"), once.
  void throw_behind(int unit) { throws_behind_ = unit; }
  // How each unit is run; by default as it is.
  using Wrap = std::function<torch::Tensor(
      const std::function<torch::Tensor(const torch::Tensor&)>& unit, const torch::Tensor& x)>;
  void set_wrap(Wrap wrap) { wrap_ = std::move(wrap); }

 private:
  struct Given {
    torch::Tensor words;
    int pass;
    int rank;
  };
  using Function = std::function<torch::Tensor(const torch::Tensor& x, const Given& given)>;

  torch::Tensor forward_unit(int unit, const torch::Tensor& x, const Given& given);
  Function made(const Unit& unit, const std::string& name);
  Function made_of_layers(Kind kind, const std::string& name);
  Function made_by_hand(const Unit& unit, const std::string& name);
  torch::Tensor own(const std::string& name, torch::Tensor values);
  struct FusedParameters {
    torch::Tensor norm, bias, gate, head;
  };
  // Every operator of zeropage/fused.h, or LibTorch's in their place.
  torch::Tensor through_operators(const torch::Tensor& x, const FusedParameters& of,
                                  const torch::Tensor& words) const;

  bool is_of(const std::string& name, int unit) const;

  const std::vector<Unit> kinds_;
  std::vector<Function> units_;
  std::vector<torch::nn::Linear> linears_;  // by unit; null where it is none
  std::vector<std::shared_ptr<ExpertUnit>> experts_;
  const Masks masks_;
  bool packs_ = false;
  bool is_plain_ = false;
  int throws_behind_ = -1;
  Wrap wrap_;
};

}  // namespace zeropage::scripts
