#include "zeropage/muon.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_set>

#include <torch/nn/modules/conv.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include "optim/embeddings.h"
#include "optim/newton_schulz.h"
#include "optim/tensor_form.h"
#include "optim/whole_step.h"
#include "zeropage/check.h"

namespace zeropage {
namespace {

struct MuonParamState : public torch::optim::OptimizerCloneableParamState<MuonParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(torch::Tensor, momentum_buffer);
  TORCH_ARG(torch::Tensor, exp_avg);
  TORCH_ARG(torch::Tensor, exp_avg_sq);

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, step);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, momentum_buffer);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, exp_avg);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, exp_avg_sq);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum_buffer);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg_sq);
  }
};

constexpr double kAdamWDecay = 0.01;

const MuonOptions& muon(const torch::optim::OptimizerOptions& options) {
  return static_cast<const MuonOptions&>(options);
}

template <typename Enum>
void read_number(torch::serialize::InputArchive& archive, const std::string& name, Enum& to) {
  c10::IValue value;
  archive.read(name, value);
  to = static_cast<Enum>(value.toInt());
}

// A list, or a tuple, as which lists come back from a saved state.
std::vector<int64_t> read_numbers(torch::serialize::InputArchive& archive,
                                  const std::string& name) {
  c10::IValue value;
  archive.read(name, value);
  if (value.isIntList()) return value.toIntVector();
  std::vector<int64_t> numbers;
  for (const c10::IValue& number : value.toTupleRef().elements()) numbers.push_back(number.toInt());
  return numbers;
}

bool has_dimensions(MuonMatrices matrices, size_t dimensions) {
  switch (matrices) {
    case MuonMatrices::kParameter:
      return dimensions == 2;
    case MuonMatrices::kBatch:
      return dimensions == 3;
    case MuonMatrices::kFlattened:
      break;
  }
  return dimensions >= 2;
}

// Each matrix has them.
struct MatrixSizes {
  int64_t batch = 1;
  int64_t rows = 0;
  int64_t columns = 0;
};

// REQUIRES: has_dimensions().
MatrixSizes sizes_of(const MuonOptions& options, at::IntArrayRef sizes) {
  if (options.matrices() == MuonMatrices::kBatch) return {sizes[0], sizes[1], sizes[2]};
  return {1, sizes[0],
          std::accumulate(sizes.begin() + 1, sizes.end(), int64_t{1}, std::multiplies<>())};
}

// Rows of each block of a matrix.
std::vector<int64_t> blocks_of(const MuonOptions& options, int64_t rows) {
  const std::vector<int64_t>& blocks = options.row_blocks();
  if (blocks.empty()) return {rows};
  if (blocks.size() > 1) return blocks;
  return std::vector<int64_t>(static_cast<size_t>(rows / blocks.front()), blocks.front());
}

double scale_of(const MuonOptions& options, int64_t rows, int64_t columns) {
  const auto m = static_cast<double>(rows);
  const auto n = static_cast<double>(columns);
  if (options.scale() == MuonScale::kMatchRmsAdamW) return 0.2 * std::sqrt(std::max(m, n));
  return std::sqrt(std::max(1.0, m / n));
}

bool are_alike(const std::vector<int64_t>& blocks) {
  return std::all_of(blocks.begin(), blocks.end(),
                     [&](int64_t rows) { return rows == blocks.front(); });
}

at::ScalarType dtype_of(const MuonOptions& options, const at::Device& device) {
  if (options.ns_dtype() != at::ScalarType::Undefined) return options.ns_dtype();
  return device.is_cpu() ? at::kFloat : at::kBFloat16;
}

optim::NewtonSchulz iteration_of(const MuonOptions& options, const at::Device& device) {
  return {.coefficients = options.ns_coefficients(),
          .steps = options.ns_steps(),
          .eps = options.ns_eps(),
          .dtype = dtype_of(options, device)};
}

class MuonForm final : public optim::TensorForm {
 public:
  double states(const Options& options, at::IntArrayRef /*sizes*/) const override {
    return static_cast<double>(optim::state_names(muon(options)).size());
  }
  UpdateReads reads(const Options& options) const override {
    return muon(options).rule() == MuonRule::kMuon ? UpdateReads::kMatrix : UpdateReads::kElement;
  }

  std::string objection_to(const Options& any, at::IntArrayRef sizes) const override {
    const MuonOptions& options = muon(any);
    if (!has_dimensions(options.matrices(), sizes.size())) return objection_to_dimensions(sizes);
    const int64_t rows = sizes_of(options, sizes).rows;
    const std::vector<int64_t>& blocks = options.row_blocks();
    const int64_t in_blocks = std::accumulate(blocks.begin(), blocks.end(), int64_t{0});
    const bool fits =
        blocks.empty() || (blocks.size() == 1 ? rows % blocks.front() == 0 : rows == in_blocks);
    if (fits) return "";
    return c10::str(": Muon's row_blocks: expected blocks that make ", rows, " rows, got ",
                    at::IntArrayRef(blocks),
                    "; give the rows of each block, or one number that divides them");
  }

  bool takes_embeddings(const Options& options) const override {
    return muon(options).takes_embeddings();
  }

  // The operations of products, with the halves that are not computed.
  double cost(const Options& any, at::IntArrayRef sizes) const override {
    const MuonOptions& options = muon(any);
    const MatrixSizes matrix = sizes_of(options, sizes);
    double cost = 0;
    for (const int64_t rows : blocks_of(options, matrix.rows)) {
      const auto less = static_cast<double>(std::min(rows, matrix.columns));
      const auto more = static_cast<double>(std::max(rows, matrix.columns));
      cost += less * less * (3 * more + less);
    }
    return cost * static_cast<double>(matrix.batch * options.ns_steps());
  }

  // Blocks that have scales of their own are scaled before they go back.
  at::ScalarType wire_dtype(const Options& any, const at::Device& device) const override {
    const MuonOptions& options = muon(any);
    const bool are_scaled = options.row_blocks().size() > 1 && !are_alike(options.row_blocks());
    return are_scaled ? at::kFloat : dtype_of(options, device);
  }

  void transform(const Options& any, const at::Tensor& directions) const override {
    const MuonOptions& options = muon(any);
    const MatrixSizes sizes = sizes_of(options, directions.sizes());
    const std::vector<int64_t> blocks = blocks_of(options, sizes.rows);
    const bool scales = !are_alike(blocks);
    const optim::NewtonSchulz how = iteration_of(options, directions.device());
    // A view, or a copy where strides do not let it.
    const at::Tensor matrices = directions.reshape({sizes.batch, sizes.rows, sizes.columns});
    for (int64_t index = 0; index < sizes.batch; ++index) {
      int64_t row = 0;
      for (const int64_t rows : blocks) {
        const at::Tensor block = matrices[index].narrow(0, row, rows);
        block.copy_(optim::orthogonalised(block, how));
        if (scales) block.mul_(scale_of(options, rows, sizes.columns));
        row += rows;
      }
    }
    if (!matrices.is_alias_of(directions)) directions.copy_(matrices.view(directions.sizes()));
  }

  double factor(const Options& any, at::IntArrayRef sizes, const Sums& /*sums*/) const override {
    const MuonOptions& options = muon(any);
    const MatrixSizes matrix = sizes_of(options, sizes);
    const std::vector<int64_t> blocks = blocks_of(options, matrix.rows);
    if (blocks.empty() || !are_alike(blocks)) return 1;
    return scale_of(options, blocks.front(), matrix.columns);
  }

 private:
  static std::string objection_to_dimensions(at::IntArrayRef sizes) {
    constexpr const char* kAdamW =
        "give it to a group with MuonOptions::adamw(lr), as zeropage::muon_groups(module, "
        "MuonOptions(lr)) does";
    if (sizes.size() < 2) {
      return c10::str(": Muon updates matrices, and this has ", sizes.size(), " dimensions; ",
                      kAdamW);
    }
    if (sizes.size() == 2) {
      return c10::str(
          ": its group's MuonOptions::matrices is for batches of matrices, and this is "
          "a single one; leave the option out, or ",
          kAdamW);
    }
    const char* const matrices = sizes.size() == 3
                                     ? "MuonMatrices::kBatch), for a matrix each element, or with "
                                       "MuonMatrices::kFlattened"
                                     : "MuonMatrices::kFlattened)";
    return c10::str(": Muon updates matrices, and this has ", sizes.size(),
                    " dimensions; make a group with MuonOptions(lr).matrices(", matrices,
                    ", for one whose columns are all dimensions but the first; or ", kAdamW);
  }
};

// Weights of three dimensions that are no batch of matrices.
std::unordered_set<const c10::TensorImpl*> filters_of(const torch::nn::Module& module) {
  std::unordered_set<const c10::TensorImpl*> filters;
  for (const auto& part : module.modules(/*include_self=*/false)) {
    if (const auto* one = part->as<torch::nn::Conv1d>()) {
      filters.insert(one->weight.unsafeGetTensorImpl());
    }
    if (const auto* one = part->as<torch::nn::ConvTranspose1d>()) {
      filters.insert(one->weight.unsafeGetTensorImpl());
    }
  }
  return filters;
}

}  // namespace

namespace optim {

std::shared_ptr<const TensorForm> muon_form() {
  return std::make_shared<const MuonForm>();
}

}  // namespace optim

MuonOptions::MuonOptions(double lr) : lr_(lr) {}

MuonOptions MuonOptions::adamw(double lr) {
  return MuonOptions(lr).rule(MuonRule::kAdamW).weight_decay(kAdamWDecay);
}

void MuonOptions::serialize(torch::serialize::InputArchive& archive) {
  read_number(archive, "rule", rule());
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, momentum);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, nesterov);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(coefficients_t, ns_coefficients);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, ns_steps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, ns_eps);
  read_number(archive, "ns_dtype", ns_dtype());
  read_number(archive, "scale", scale());
  read_number(archive, "matrices", matrices());
  row_blocks(read_numbers(archive, "row_blocks"));
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, takes_embeddings);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
}

void MuonOptions::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("rule", c10::IValue(static_cast<int64_t>(rule())));
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(nesterov);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(ns_coefficients);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(ns_steps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(ns_eps);
  archive.write("ns_dtype", c10::IValue(static_cast<int64_t>(ns_dtype())));
  archive.write("scale", c10::IValue(static_cast<int64_t>(scale())));
  archive.write("matrices", c10::IValue(static_cast<int64_t>(matrices())));
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(row_blocks);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(takes_embeddings);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
}

double MuonOptions::get_lr() const {
  return lr();
}

void MuonOptions::set_lr(double lr) {
  this->lr(lr);
}

bool operator==(const MuonOptions& one, const MuonOptions& other) {
  const auto all = [](const MuonOptions& of) {
    return std::tuple(of.rule(), of.lr(), of.weight_decay(), of.momentum(), of.nesterov(),
                      of.ns_coefficients(), of.ns_steps(), of.ns_eps(), of.ns_dtype(), of.scale(),
                      of.matrices(), of.row_blocks(), of.takes_embeddings(), of.betas(), of.eps());
  };
  return all(one) == all(other);
}

void check_options(const MuonOptions& options) {
  const auto [beta1, beta2] = options.betas();
  ZP_CHECK(options.lr() >= 0, "Muon: lr: expected 0 or more, got ", options.lr());
  ZP_CHECK(options.weight_decay() >= 0, "Muon: weight_decay: expected 0 or more, got ",
           options.weight_decay());
  ZP_CHECK(options.momentum() >= 0 && options.momentum() < 1,
           "Muon: momentum: expected it in [0, 1), got ", options.momentum());
  ZP_CHECK(options.ns_steps() >= 1 && options.ns_steps() < 100,
           "Muon: ns_steps: expected 1 to 99, got ", options.ns_steps());
  constexpr double kLeastEps = 1e-30;  // whose inverse fp32 has
  ZP_CHECK(options.ns_eps() >= kLeastEps, "Muon: ns_eps: expected ", kLeastEps, " or more, got ",
           options.ns_eps());
  const at::ScalarType dtype = options.ns_dtype();
  ZP_CHECK(dtype == at::ScalarType::Undefined || dtype == at::kFloat || dtype == at::kBFloat16,
           "Muon: ns_dtype: expected float or bfloat16, got ", dtype);
  ZP_CHECK(std::all_of(options.row_blocks().begin(), options.row_blocks().end(),
                       [](int64_t rows) { return rows > 0; }),
           "Muon: row_blocks: expected 1 row or more in each, got ",
           at::IntArrayRef(options.row_blocks()));
  ZP_CHECK(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1,
           "Muon: betas: expected each in [0, 1), got ", beta1, " and ", beta2);
  ZP_CHECK(options.eps() >= 0, "Muon: eps: expected 0 or more, got ", options.eps());
}

std::vector<torch::optim::OptimizerParamGroup> muon_groups(const torch::nn::Module& module,
                                                           const MuonOptions& matrices,
                                                           const MuonOptions& others) {
  return muon_groups(module, module.parameters(), matrices, others);
}

std::vector<torch::optim::OptimizerParamGroup> muon_groups(
    const torch::nn::Module& module, const std::vector<at::Tensor>& parameters,
    const MuonOptions& matrices, const MuonOptions& others) {
  const optim::Embeddings embeddings(module);
  const std::unordered_set<const c10::TensorImpl*> filters = filters_of(module);
  std::vector<at::Tensor> of_matrices, of_batches, of_others;
  for (const at::Tensor& parameter : parameters) {
    const bool is_embedding = embeddings.contain(parameter) && !matrices.takes_embeddings();
    const bool is_batch = matrices.matrices() == MuonMatrices::kBatch && parameter.dim() == 3 &&
                          !filters.contains(parameter.unsafeGetTensorImpl());
    const bool is_matrix = parameter.dim() == 2 ||
                           (matrices.matrices() == MuonMatrices::kFlattened && parameter.dim() > 2);
    std::vector<at::Tensor>& group = is_embedding ? of_others
                                     : is_batch   ? of_batches
                                     : is_matrix  ? of_matrices
                                                  : of_others;
    group.push_back(parameter);
  }
  const bool has_batches = matrices.matrices() == MuonMatrices::kBatch;
  MuonOptions of_single = matrices;
  if (has_batches) of_single.matrices(MuonMatrices::kParameter);
  // Also empty ones: the stages of a pipeline have as many groups.
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(of_matrices, std::make_unique<MuonOptions>(of_single));
  if (has_batches) groups.emplace_back(of_batches, std::make_unique<MuonOptions>(matrices));
  groups.emplace_back(of_others, std::make_unique<MuonOptions>(others));
  return groups;
}

at::Tensor orthogonalised(const at::Tensor& matrix, const MuonOptions& options) {
  ZP_CHECK(matrix.dim() == 2 && matrix.is_floating_point(),
           "orthogonalised: expected floating point of two dimensions, got ", matrix.scalar_type(),
           " of sizes ", matrix.sizes());
  check_options(options);
  const torch::NoGradGuard no_grad;
  return optim::orthogonalised(matrix, iteration_of(options, matrix.device()));
}

Muon::Muon(const std::vector<torch::optim::OptimizerParamGroup>& groups,
           const MuonOptions& defaults)
    : Optimizer(groups, std::make_unique<MuonOptions>(defaults)) {
  check_options(defaults);
  for (const auto& group : param_groups_) check_options(muon(group.options()));
}

torch::Tensor Muon::step(LossClosure closure) {
  using optim::made_alike;
  return optim::step_groups<MuonOptions, MuonParamState>(
      closure, param_groups_, state_,
      [](const MuonOptions& options, const at::Tensor& parameter, MuonParamState& state) {
        std::vector<at::Tensor> states;
        if (options.rule() == MuonRule::kMuon) {
          states = {made_alike(state.momentum_buffer(), parameter)};
        } else {
          states = {made_alike(state.exp_avg(), parameter),
                    made_alike(state.exp_avg_sq(), parameter)};
        }
        optim::whole_step("Muon", options, ++state.step(), MuonForm(), parameter, parameter.grad(),
                          states);
      });
}

void Muon::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<MuonParamState, MuonOptions>(archive, *this);
}

void Muon::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<MuonParamState, MuonOptions>(archive, *this);
}

}  // namespace zeropage
