#include "language_model/model/language_model.h"

#include <algorithm>
#include <cmath>

#include <zeropage/expert_parallel.h>

#include "language_model/model/gpt2.h"
#include "language_model/model/llama.h"

namespace language_model {
namespace {

using zeropage::checkpointing::EveryBlocks;

// The index in its row at which each token's document begins: [batch, length].
torch::Tensor begins_of(const torch::Tensor& documents) {
  const torch::Tensor index = torch::arange(documents.size(1), documents.options());
  torch::Tensor is_first = torch::ones_like(documents, torch::kBool);
  is_first.slice(1, 1) = documents.slice(1, 1) != documents.slice(1, 0, -1);
  return std::get<0>(torch::where(is_first, index, 0).cummax(1));
}

// [1, 1, queries, keys]: each query sees the keys up to its own.
torch::Tensor causal_mask(int64_t before, int64_t queries, const torch::Device& device) {
  const auto options = torch::TensorOptions(torch::kLong).device(device);
  const torch::Tensor key = torch::arange(before + queries, options);
  const torch::Tensor query = torch::arange(before, before + queries, options);
  return (key <= query.unsqueeze(1)).unsqueeze(0).unsqueeze(0);
}

bool ends_with_part(const std::string& name, const std::string& end) {
  return name == end || name.ends_with("." + end);
}

}  // namespace

void LanguageModel::tile_mlps() {
  TORCH_CHECK(
      !config_.experts,
      "MLPs in tiles: the model has experts, whose loss of balance is of all tokens at once; "
      "recompute layers instead");
  tiles_mlps_ = true;
}

void LanguageModel::share_rows(ContextAxis axis) {
  const int ranks = axis.ranks.size();
  TORCH_CHECK(
      config_.attention_dropout == 0, "rows over ", ranks, " ranks: the model drops ",
      config_.attention_dropout,
      " of attention's weights in training, which attention over ranks cannot; set "
      "attention_dropout (attn_pdrop) to 0 in its config.json, or give each rank whole rows");
  TORCH_CHECK(!config_.experts, "rows over ", ranks,
              " ranks: the model has experts, whose loss of balance would be of a part of each "
              "row; give each rank whole rows");
  TORCH_CHECK(axis.form == zeropage::parallel::ContextForm::kRing || config_.heads % ranks == 0,
              "rows over ", ranks, " ranks: the model's ", config_.heads,
              " heads are no multiple of them, as Ulysses needs; use the ring");
  context_ = std::move(axis);
}

void LanguageModel::spread_experts(const zeropage::comm::Mesh& mesh) {
  TORCH_CHECK(config_.experts, "experts over ", mesh["expert"].size(), " ranks: a model of type ",
              name_of(config_.architecture), " has no experts");
  zeropage::expert_parallel(*this, mesh);
  expert_ranks_ = mesh["expert"];
}

torch::Tensor LanguageModel::positions_of(const torch::Tensor& tokens,
                                          const torch::Tensor& documents) const {
  using namespace zeropage::parallel;
  const int64_t length = tokens.size(1);
  if (!context_) {
    const torch::Tensor positions = torch::arange(length, tokens.options()).unsqueeze(0);
    return documents.defined() ? positions - begins_of(documents) : positions;
  }
  const zeropage::comm::World& ranks = context_->ranks;
  const torch::Tensor positions =
      context_positions(length * ranks.size(), ranks, tokens.device()).unsqueeze(0);
  if (!documents.defined()) return positions;
  // A document may begin on another rank.
  const torch::Tensor begins = begins_of(gather_context(documents, 1, ranks));
  return positions - begins.index_select(1, positions.squeeze(0));
}

torch::Tensor LanguageModel::body(const torch::Tensor& tokens, const torch::Tensor& documents,
                                  KeyValueCache* cache) {
  const int64_t before = cache == nullptr ? 0 : cache->length();
  const int64_t length = tokens.size(1);
  TORCH_CHECK(cache == nullptr || !context_,
              "a text that is written grows by a token, which no ranks can split; open the model "
              "without an axis for its rows");
  TORCH_CHECK(
      (context_ ? context_->ranks.size() : 1) * length + before <= longest_sequence(config_),
      "a sequence of ", before + length, " tokens is longer than the model's ",
      longest_sequence(config_));
  ForwardContext context{.angles = {}, .mask = {}, .cache = cache, .tiles_mlps = tiles_mlps_};
  const torch::Tensor positions = positions_of(tokens, documents) + before;
  if (context_) {
    context.mask.context = &*context_;
    context.mask.documents = documents;
  } else if (documents.defined()) {
    const torch::Tensor begins = begins_of(documents);
    context.mask.seen = (begins.unsqueeze(2) == begins.unsqueeze(1)).unsqueeze(1) &
                        causal_mask(0, length, tokens.device());
  } else if (before > 0 && length > 1) {
    context.mask.seen = causal_mask(before, length, tokens.device());
  }
  if (is_training()) context.mask.dropout = config_.attention_dropout;
  torch::Tensor x = embed(tokens, positions);
  if (config_.architecture != Architecture::kGpt2)
    context.angles = rotary_angles(config_, positions, x.scalar_type());
  const auto self = std::static_pointer_cast<LanguageModel>(shared_from_this());
  x = zeropage::checkpointing::checkpoint_each(
      layer_count(), cache == nullptr ? recompute_ : EveryBlocks::none(), std::move(x),
      [self, context](const torch::Tensor& state, int64_t layer) {
        return self->run_layer(layer, state, context);
      });
  if (cache != nullptr) cache->advance(length);
  return x;
}

torch::Tensor LanguageModel::forward(const torch::Tensor& tokens, const torch::Tensor& targets,
                                     const torch::Tensor& documents) {
  const torch::Tensor x = final_norm(body(tokens, documents, nullptr));
  const torch::Tensor loss = head_loss(x, head_weight(), targets);
  const torch::Tensor balance = balance_loss();
  return balance.defined() ? loss + balance : loss;
}

torch::Tensor LanguageModel::next_logits(const torch::Tensor& tokens, KeyValueCache& cache) {
  const torch::Tensor last = body(tokens, {}, &cache).slice(1, -1).squeeze(1);
  balance_loss();
  return torch::linear(final_norm(last), head_weight()).to(torch::kFloat32);
}

torch::Tensor LanguageModel::logits(const torch::Tensor& tokens, const torch::Tensor& documents) {
  const torch::Tensor x = final_norm(body(tokens, documents, nullptr));
  balance_loss();  // nobody else takes it
  return torch::linear(x, head_weight());
}

double first_deviation(const ModelConfig& config, const std::string& name) {
  const bool is_residual =
      config.architecture == Architecture::kGpt2 && name.ends_with("c_proj.weight");
  return is_residual
             ? config.initial_deviation / std::sqrt(2.0 * static_cast<double>(config.layers))
             : config.initial_deviation;
}

void LanguageModel::draw(uint64_t seed) {
  const torch::NoGradGuard no_grad;
  torch::manual_seed(seed);
  for (auto& parameter : named_parameters()) {
    if (parameter.value().dim() < 2) continue;
    torch::nn::init::normal_(parameter.value(), 0.0, first_deviation(config_, parameter.key()));
  }
}

std::vector<std::pair<std::string, Projection>> LanguageModel::projections() const {
  std::vector<std::pair<std::string, Projection>> found;
  for (const auto& module : named_modules("", /*include_self=*/false)) {
    const auto projection = std::dynamic_pointer_cast<ProjectionImpl>(module.value());
    if (projection) found.emplace_back(module.key(), Projection(projection));
  }
  return found;
}

void LanguageModel::add_adapters(const std::vector<std::string>& targets,
                                 const AdapterOptions& options) {
  const auto layers = projections();
  std::vector<bool> is_used(targets.size());
  for (auto& parameter : parameters()) parameter.set_requires_grad(false);
  for (auto& [name, layer] : layers) {
    for (size_t i = 0; i < targets.size(); ++i) {
      if (!ends_with_part(name, targets[i])) continue;
      TORCH_CHECK(!config_.experts || name.find(".self_attn.") != std::string::npos, "layer \"",
                  name, "\": adapters of a model with experts are for attention alone; leave \"",
                  targets[i], "\" out");
      is_used[i] = true;
      if (!layer->has_adapter()) Projection(layer)->add_adapter(options);
    }
  }
  for (size_t i = 0; i < targets.size(); ++i) {
    if (is_used[i]) continue;
    std::vector<std::string> known;
    for (const auto& [name, layer] : layers) {
      const std::string end = name.substr(name.rfind('.') + 1);
      if (std::find(known.begin(), known.end(), end) == known.end()) known.push_back(end);
    }
    TORCH_CHECK(false, "the model has no layer \"", targets[i], "\" for an adapter; it has ",
                c10::Join(", ", known));
  }
}

std::shared_ptr<LanguageModel> make_model(const ModelConfig& config, const MakeOptions& options) {
  if (config.architecture == Architecture::kGpt2) return std::make_shared<Gpt2>(config, options);
  return std::make_shared<Llama>(config, options);
}

}  // namespace language_model
