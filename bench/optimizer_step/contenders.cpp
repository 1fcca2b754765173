#include "bench/optimizer_step/contenders.h"

#include <algorithm>
#include <benchmark/benchmark.h>

#include <ATen/Parallel.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include "bench/optimizer_step/same_mix.h"
#include "optim/cpu/fused_step.h"
#include "optim/cpu/instructions.h"
#include "optim/cpu/packed_step.h"
#include "optim/cuda/current_stream.h"
#include "optim/fused_step.h"
#include "optim/packed_tensors.h"
#include "optim/stretch_list.h"
#include "zeropage/zeropage.h"

namespace optimizer_step {
namespace {

using zeropage::StateFormat;
using zeropage::optim::GradientAfter;
using zeropage::optim::Stretch;

constexpr int64_t kStepNumber = 10;
constexpr int64_t kStepBytes = 7 * 4;  // an element: 4 buffers read, 3 written
constexpr int64_t kCopyOutBytes = 2;
constexpr int64_t k8BitStepBytes = 3 * 4 + 4 * 1;  // without scales, 1 / 16 byte more

const torch::optim::AdamWOptions& options() {
  static const torch::optim::AdamWOptions options(1e-3);
  return options;
}

Stretch stretch_of(const at::Device& device, int64_t numel) {
  const auto as = at::TensorOptions(device).dtype(at::kFloat);
  return {.values = at::randn({numel}, as),
          .gradient = at::randn({numel}, as),
          .states = {at::full({numel}, 0.1, as), at::full({numel}, 1.0, as)}};
}

// LibTorch's lists of the same tensors.
struct Lists {
  std::vector<at::Tensor> values, gradients, exp_avgs, exp_avg_sqs, steps;
};

Lists lists_of(const std::vector<Stretch>& stretches) {
  Lists lists;
  for (const Stretch& stretch : stretches) {
    lists.values.push_back(stretch.values);
    lists.gradients.push_back(stretch.gradient);
    lists.exp_avgs.push_back(stretch.states[0]);
    lists.exp_avg_sqs.push_back(stretch.states[1]);
    lists.steps.push_back(at::full({}, kStepNumber, stretch.values.options()));
  }
  return lists;
}

void libtorchs_step(const Lists& lists) {
  const auto [beta1, beta2] = options().betas();
  at::_fused_adamw_(lists.values, lists.gradients, lists.exp_avgs, lists.exp_avg_sqs, {},
                    lists.steps, options().lr(), beta1, beta2, options().weight_decay(),
                    options().eps(), /*amsgrad=*/false, /*maximize=*/false);
}

constexpr int64_t kNumelPerThread = 32768;  // at least

void same_mix(const Stretch& s) {
  const SameMix mix{s.values.data_ptr<float>(),
                    s.gradient.data_ptr<float>(),
                    {s.states[0].data_ptr<float>(), s.states[1].data_ptr<float>()},
                    s.values.numel()};
  if (!s.values.is_cpu()) {
    return touch_on_cuda(mix, zeropage::optim::cuda::current_stream(s.values.device()));
  }
  at::parallel_for(0, mix.numel, kNumelPerThread,
                   [&](int64_t begin, int64_t end) { touch_on_cpu(mix, begin, end); });
}

Stretch with_8_bit_states(const Stretch& plain) {
  return {
      .values = plain.values,
      .gradient = plain.gradient,
      .states = zeropage::optim::make_states(options(), plain.values, zeropage::StateFormat::k8Bit),
      .scales = zeropage::optim::make_scales(options(), plain.values, /*first_in_block=*/0)};
}

// The loops themselves, by no more than those instructions.
void step_with(zeropage::optim::cpu::Instructions instructions, const Stretch& s) {
  using namespace zeropage::optim;
  const zeropage::optim::UpdateRule rule = zeropage::optim::rule_of(options(), kStepNumber);
  zeropage::optim::FlatStretch flat{.values = s.values.data_ptr<float>(),
                                    .gradient = s.gradient.const_data_ptr(),
                                    .numel = s.values.numel()};
  if (zeropage::optim::is_packed(s)) {
    const zeropage::optim::PackedStretch packed = zeropage::optim::packed_of(s, flat, kStepNumber);
    const int64_t blocks = zeropage::blocks_of(/*first_in_block=*/0, flat.numel);
    at::parallel_for(
        0, blocks, kNumelPerThread / zeropage::kStateBlockNumel, [&](int64_t begin, int64_t end) {
          cpu::packed_step(rule, packed, begin * zeropage::kStateBlockNumel,
                           std::min(end * zeropage::kStateBlockNumel, flat.numel), instructions);
        });
    return;
  }
  for (size_t i = 0; i < s.states.size(); ++i) flat.states[i] = s.states[i].data_ptr<float>();
  at::parallel_for(0, flat.numel, kNumelPerThread, [&](int64_t begin, int64_t end) {
    cpu::fused_step(rule, flat, begin, end, instructions);
  });
}

// Factors that change nothing, so that repeated steps find the gradient as it was.
constexpr double kUnscale = 1;
constexpr double kClip = 1;

void separate_calls(const Stretch& s, const Lists& lists) {
  at::Tensor(s.gradient).mul_(kUnscale);
  at::Tensor(s.gradient).mul_(kClip);
  libtorchs_step(lists);
  at::Tensor(s.copy_out).copy_(s.values);
}

constexpr int64_t kTensorNumel = 1000;

struct ManyParametersImpl : torch::nn::Module {
  explicit ManyParametersImpl(int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      register_parameter("weight" + std::to_string(i), at::randn({kTensorNumel}));
    }
  }
  // The gradient of every element is 1.
  at::Tensor forward() const {
    std::vector<at::Tensor> sums;
    for (const at::Tensor& parameter : parameters()) sums.push_back(parameter.sum());
    return at::stack(sums).sum();
  }
};
TORCH_MODULE(ManyParameters);

// What a training script has of such parameters: they are in pages, and so one stretch.
class Training {
 public:
  Training(const at::Device& device, int64_t count)
      : model_(module_on(device, count),
               zeropage::comm::World::from_environment(world_options(device)), {}),
        optimizer_(model_, options()) {
    for (const at::Tensor& parameter : model_.module()->parameters()) {
      impls_.push_back(parameter.unsafeGetTensorImpl());
    }
  }
  // It takes far longer than their step, and without it a step would reduce gradients first.
  void backward() {
    optimizer_.zero_grad();
    const at::AutoGradMode with_grad(true);
    model_().backward();
  }
  void step() { optimizer_.step(); }
  // What a look at each parameter costs at least, behind the same backward: the address of its first element and its version.
  uint64_t read_each() const {
    uint64_t sum = 0;
    for (const c10::TensorImpl* const impl : impls_) {
      sum += reinterpret_cast<uintptr_t>(impl->data()) + impl->version_counter().current_version();
    }
    return sum;
  }

 private:
  static zeropage::comm::WorldOptions world_options(const at::Device& device) {
    zeropage::comm::WorldOptions options;
    options.device = device.type();
    return options;
  }
  static ManyParameters module_on(const at::Device& device, int64_t count) {
    ManyParameters module(count);
    module->to(device);
    return module;
  }

  zeropage::DistributedDataParallel<ManyParameters> model_;
  zeropage::Optimizer<torch::optim::AdamW> optimizer_;
  std::vector<const c10::TensorImpl*> impls_;
};

}  // namespace

Group flat_group(const c10::Device& device, int64_t numel) {
  const Stretch plain = stretch_of(device, numel);
  Stretch copied = plain;
  copied.copy_out = at::empty({numel}, plain.values.options().dtype(at::kBFloat16));
  // Where the gradient becomes zero.
  Stretch zeroed = plain;
  zeroed.gradient = at::randn({numel}, plain.values.options());
  const Lists lists = lists_of({plain});
  using zeropage::optim::fused_step;
  Group group{.name = "one flat stretch", .numel = numel};
  const auto add = [&](const std::string& name, int64_t bytes, std::function<void()> run) {
    group.contenders.push_back({name, std::move(run)});
    group.bytes.push_back(bytes);
    return group.contenders.size() - 1;
  };
  const size_t ours =
      add("fused AdamW", kStepBytes, [=] { fused_step(options(), kStepNumber, plain); });
  const size_t libtorchs = add("at::_fused_adamw_", kStepBytes, [=] { libtorchs_step(lists); });
  const size_t mix = add("same mix of bytes", kStepBytes, [=] { same_mix(plain); });
  add("plain copy", 2 * 4, [=] { at::Tensor(plain.values).copy_(plain.gradient); });
  const size_t pass = add("factors, AdamW, copy out", kStepBytes + kCopyOutBytes, [=] {
    fused_step(options(), kStepNumber, copied, {.scale = kUnscale * kClip});
  });
  const size_t calls = add("LibTorch's four calls", kStepBytes + kCopyOutBytes,
                           [=] { separate_calls(copied, lists); });
  const size_t zeroing = add("AdamW that zeroes", kStepBytes + 4, [=] {
    fused_step(options(), kStepNumber, zeroed, {.after = zeropage::optim::GradientAfter::kZeroed});
  });
  const size_t zero_after = add("AdamW, then zero_()", kStepBytes + 4, [=] {
    fused_step(options(), kStepNumber, zeroed);
    at::Tensor(zeroed.gradient).zero_();
  });
  const Stretch small = with_8_bit_states(plain);
  const size_t in_8_bits = add("fused AdamW, 8-bit states", k8BitStepBytes,
                               [=] { fused_step(options(), kStepNumber, small); });
  group.ratios = {{"fused AdamW / copy bandwidth", mix, ours, 0.90},
                  {"fused AdamW / at::_fused_adamw_", libtorchs, ours, 1.0},
                  {"unscale, clip, AdamW and copy out / LibTorch's four calls", calls, pass, 1.5},
                  {"AdamW that zeroes / AdamW, then zero_()", zero_after, zeroing},
                  {"fused AdamW, 8-bit states / fused AdamW", ours, in_8_bits, 1.7}};
  return group;
}

Group list_group(const c10::Device& device, int64_t count) {
  std::vector<Stretch> stretches;
  for (int64_t i = 0; i < count; ++i) stretches.push_back(stretch_of(device, kTensorNumel));
  const int64_t numel = count * kTensorNumel;
  const Stretch flat = stretch_of(device, numel);
  const Lists lists = lists_of(stretches);
  const zeropage::optim::StretchList prepared(stretches);
  const auto training = std::make_shared<Training>(device, count);
  using zeropage::optim::fused_step;
  return {.name = std::to_string(count) + " tensors of 1000 elements",
          .numel = numel,
          .contenders =
              {{"one flat stretch", [=] { fused_step(options(), kStepNumber, flat); }},
               {"a list of stretches",
                [=] { fused_step(options(), kStepNumber, std::span<const Stretch>(stretches)); }},
               {"a list, prepared", [=] { fused_step(options(), kStepNumber, prepared); }},
               {"a call for each",
                [=] {
                  for (const Stretch& stretch : stretches) {
                    fused_step(options(), kStepNumber, stretch);
                  }
                }},
               {"at::_fused_adamw_", [=] { libtorchs_step(lists); }},
               {"zeropage::Optimizer", [=] { training->step(); }, [=] { training->backward(); }},
               {"flat, behind a backward", [=] { fused_step(options(), kStepNumber, flat); },
                [=] { training->backward(); }},
               {"a look at each tensor", [=] { benchmark::DoNotOptimize(training->read_each()); },
                [=] { training->backward(); }}},
          // The last reads none of the elements.
          .bytes = {kStepBytes, kStepBytes, kStepBytes, kStepBytes, kStepBytes, kStepBytes,
                    kStepBytes, 0},
          .ratios = {{"zeropage::Optimizer / one flat stretch", 0, 5, 0.90},
                     {"zeropage::Optimizer / one flat stretch, each behind a backward", 6, 5},
                     {"zeropage::Optimizer / at::_fused_adamw_ of lists", 4, 5},
                     {"a list of stretches / one flat stretch", 0, 1},
                     {"a list, prepared / one flat stretch", 0, 2},
                     {"a list of stretches / a call for each", 3, 1},
                     {"a list of stretches / at::_fused_adamw_ of lists", 4, 1}}};
}

Group instructions_group(int64_t numel) {
  using zeropage::optim::cpu::Instructions;
  const Stretch plain = stretch_of(at::kCPU, numel);
  const Stretch small = with_8_bit_states(plain);
  Group group{.name = "each set of instructions", .numel = numel};
  for (const Instructions set :
       {Instructions::kAnyProcessor, Instructions::kAvx2, Instructions::kAvx512}) {
    if (set > zeropage::optim::cpu::best_instructions()) break;
    const std::string name(zeropage::optim::cpu::name_of(set));
    const size_t in_fp32 = group.contenders.size();
    group.contenders.push_back({"fp32 states, " + name, [=] { step_with(set, plain); }});
    group.contenders.push_back({"8-bit states, " + name, [=] { step_with(set, small); }});
    group.bytes.insert(group.bytes.end(), {kStepBytes, k8BitStepBytes});
    group.ratios.push_back({"8-bit states / fp32 states, " + name, in_fp32, in_fp32 + 1});
    if (in_fp32 == 0) continue;
    group.ratios.push_back({"fp32 states, " + name + " / default", 0, in_fp32});
    group.ratios.push_back({"8-bit states, " + name + " / default", 1, in_fp32 + 1});
  }
  return group;
}

}  // namespace optimizer_step
