#include <algorithm>
#include <cmath>
#include <functional>
#include <string_view>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "parallel/context/blocks.h"
#include "parallel/context/chunks.h"
#include "parallel/context/model_ranks.h"
#include "parallel/context/operators.h"
#include "parallel/detail/kernels.h"
#include "parallel/nodes_of_ranks.h"
#include "zeropage/check.h"
#include "zeropage/context_parallel.h"
#include "zeropage/detail/slices.h"

namespace zeropage::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kAttentionName = "context_attention";

class RingAttention : public torch::autograd::Function<RingAttention> {
 public:
  static at::Tensor forward(AutogradContext* kept, const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value, const std::optional<at::Tensor>& documents,
                            double scale, bool is_causal, const RanksPointer& ranks,
                            const std::string& name) {
    auto [output, log_sum] =
        context::ring_forward(query, key, value, documents, scale, is_causal, ranks, name);
    kept->save_for_backward({query, key, value, output, log_sum, documents.value_or(at::Tensor())});
    kept->saved_data["scale"] = scale;
    kept->saved_data["is_causal"] = is_causal;
    kept->saved_data["ranks"] = ranks;
    kept->saved_data["name"] = name;
    return output;
  }
  static variable_list backward(AutogradContext* kept, const variable_list& gradients) {
    const std::string name = kept->saved_data["name"].toStringRef();
    detail::refuse_second_derivative(kAttentionName, name);
    const variable_list saved = kept->get_saved_variables();
    const auto documents = saved[5].defined() ? std::optional<at::Tensor>(saved[5]) : std::nullopt;
    auto [of_query, of_key, of_value] = context::ring_backward(
        gradients[0], saved[0], saved[1], saved[2], saved[3], saved[4], documents,
        kept->saved_data["scale"].toDouble(), kept->saved_data["is_causal"].toBool(),
        kept->saved_data["ranks"].toCustomClass<Ranks>(), name);
    return {of_query,     of_key,       of_value,     at::Tensor(),
            at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

// What exchange_heads() is differentiated to is the other way.
class ExchangeHeads : public torch::autograd::Function<ExchangeHeads> {
 public:
  static at::Tensor forward(AutogradContext* kept, const at::Tensor& given, bool to_heads,
                            const RanksPointer& ranks, const std::string& name) {
    kept->saved_data["to_heads"] = to_heads;
    kept->saved_data["ranks"] = ranks;
    kept->saved_data["name"] = name;
    return context::exchange_heads(given, to_heads, ranks, name);
  }
  static variable_list backward(AutogradContext* kept, const variable_list& gradients) {
    const std::string name = kept->saved_data["name"].toStringRef();
    detail::refuse_second_derivative(kAttentionName, name);
    return {context::exchange_heads(gradients[0], !kept->saved_data["to_heads"].toBool(),
                                    kept->saved_data["ranks"].toCustomClass<Ranks>(), name),
            at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

// A hash of what this thread split last; 0: nothing, or on a device, which it would wait for. Ranks along the axis have the same
// samples, so attention compares it: a sampler that goes by the rank of the whole world gives them others.
uint64_t& hash_of_last_split() {
  thread_local uint64_t hash = 0;
  return hash;
}

uint64_t hash_of(const at::Tensor& whole) {
  if (!whole.device().is_cpu() || whole.numel() == 0) return 0;
  // The beginnings of two samples differ, and embeddings may be large.
  constexpr size_t kMostBytes = 1 << 20;
  const at::Tensor contiguous = whole.detach().contiguous();
  const std::string_view bytes(static_cast<const char*>(contiguous.const_data_ptr()),
                               std::min(contiguous.nbytes(), kMostBytes));
  return std::hash<std::string_view>()(bytes);
}

at::Tensor in_dtype_of_autocast(const at::Tensor& tensor) {
  const c10::DeviceType device = tensor.device().type();
  // A simulated world has no autocast.
  if (tensor.is_meta() || !at::autocast::is_autocast_enabled(device)) return tensor;
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
}

void check_tensors(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const ContextAttentionOptions& options) {
  ZP_CHECK(query.dim() == 4 && key.dim() == 4, kAttentionName,
           ": expected query, key and value [batch, heads, length / ranks, head size], got ",
           query.sizes(), ", ", key.sizes(), " and ", value.sizes(),
           "; transpose(1, 2) of [batch, length / ranks, heads, head size]");
  const int64_t heads = key.size(1);
  ZP_CHECK(
      key.sizes() == value.sizes() && heads > 0 && query.size(0) == key.size(0) &&
          query.size(1) % heads == 0 && query.size(2) == key.size(2) &&
          query.size(3) == key.size(3),
      kAttentionName,
      ": expected a key and a value alike, of the query's sizes but for a number of heads that "
      "divides its ",
      query.size(1), ", got ", query.sizes(), ", ", key.sizes(), " and ", value.sizes());
  ZP_CHECK(query.numel() > 0 && query.size(2) % 2 == 0, kAttentionName,
           ": expected two chunks of as many tokens, got ", query.sizes(),
           "; split the sequence by split_context()");
  const at::ScalarType dtype = query.scalar_type();
  ZP_CHECK(key.scalar_type() == dtype && value.scalar_type() == dtype &&
               (dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 ||
                dtype == at::kHalf),
           kAttentionName,
           ": expected query, key and value in one of fp64, fp32, bf16 and fp16, got ", dtype, ", ",
           key.scalar_type(), " and ", value.scalar_type());
  const at::Tensor& documents = options.documents;
  ZP_CHECK(!documents.defined() ||
               (documents.sizes() == at::IntArrayRef({query.size(0), query.size(2)}) &&
                at::isIntegralType(documents.scalar_type(), /*includeBool=*/false) &&
                documents.device() == query.device()),
           kAttentionName, ": documents: expected integers [", query.size(0), ", ", query.size(2),
           "] on ", query.device(), ", got ",
           documents.defined() ? c10::str(documents.scalar_type(), " ", documents.sizes(), " on ",
                                          documents.device())
                               : "none");
}

// The number of key heads that are exchanged, each of them with as many query heads. query_heads: of all ranks.
int64_t exchanged_heads(int64_t query_heads, int64_t key_heads, int ranks) {
  if (key_heads % ranks == 0) return key_heads;
  return ranks % key_heads == 0 ? ranks : query_heads;
}

at::Tensor attend_by_heads(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const ContextAttentionOptions& options, double scale,
                           const RanksPointer& ranks, const std::string& name) {
  const int count = ranks->world.size();
  ZP_CHECK(query.size(1) % count == 0, name,
           ": ContextForm::kUlysses: expected a number of heads "
           "that its ",
           count, " ranks divide, got ", query.size(1),
           "; use ContextForm::kRing, or fewer ranks along the axis");
  const int64_t key_heads = exchanged_heads(query.size(1), key.size(1), count);
  const auto of_heads = [&](const at::Tensor& tensor) {
    return ExchangeHeads::apply(tensor, /*to_heads=*/true, ranks, name);
  };
  const at::Tensor own_query = of_heads(query);
  std::optional<at::Tensor> mask;
  if (options.documents.defined()) {
    const int64_t whole = own_query.size(2);
    const at::Tensor all =
        context::gather_alike(options.documents.to(at::kLong).contiguous(), ranks, name)
            .movedim(0, 1)
            .flatten(1, 2)
            .index_select(1, context::places_of_positions(whole, count).to(query.device()));
    mask = (all.unsqueeze(2) == all.unsqueeze(1)).unsqueeze(1);
    if (options.is_causal) {
      mask = *mask & at::ones({whole, whole}, mask->options()).tril();
    }
  }
  const at::Tensor own = at::scaled_dot_product_attention(
      own_query, of_heads(context::repeat_heads(key, key_heads)),
      of_heads(context::repeat_heads(value, key_heads)), mask, /*dropout_p=*/0,
      options.is_causal && !mask, scale, /*enable_gqa=*/key_heads != query.size(1));
  return ExchangeHeads::apply(own, /*to_heads=*/false, ranks, name);
}

}  // namespace

bool context::is_node_of_attention(const torch::autograd::Node& node) {
  using torch::autograd::CppNode;
  return dynamic_cast<const CppNode<RingAttention>*>(&node) != nullptr ||
         dynamic_cast<const CppNode<ExchangeHeads>*>(&node) != nullptr;
}

at::Tensor context_attention(const at::Tensor& given_query, const at::Tensor& given_key,
                             const at::Tensor& given_value, const comm::World& world,
                             const ContextAttentionOptions& options) {
  const at::Tensor query = in_dtype_of_autocast(given_query);
  const at::Tensor key = in_dtype_of_autocast(given_key);
  const at::Tensor value = in_dtype_of_autocast(given_value);
  check_tensors(query, key, value, options);
  context::begin_attention(world, kAttentionName);
  const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(query.size(3))));
  // Ranks compare it with every message.
  constexpr uint64_t kShown = 1'000'000;
  const std::string name =
      c10::str(kAttentionName, " of ", query.sizes(), " in ", query.scalar_type(), ", ",
               key.size(1), " key heads", options.is_causal ? ", causal" : "",
               options.documents.defined() ? ", documents" : "", ", scale ", scale,
               ", after a split of #", hash_of_last_split() % kShown, context::current_forward());
  const RanksPointer ranks = ranks_of(world);
  if (options.form == ContextForm::kUlysses) {
    return attend_by_heads(query, key, value, options, scale, ranks, name);
  }
  std::optional<at::Tensor> documents;
  if (options.documents.defined()) documents = options.documents.to(at::kLong).contiguous();
  return RingAttention::apply(query, key, value, documents, scale, options.is_causal, ranks, name);
}

at::Tensor split_context(const at::Tensor& whole, int64_t dim, const comm::World& world) {
  ZP_CHECK(dim >= -whole.dim() && dim < whole.dim(),
           "split_context: expected the dimension of tokens, from ", -whole.dim(), " to ",
           whole.dim() - 1, ", got ", dim, " of a tensor of ", whole.sizes());
  const int64_t length = whole.size(dim);
  context::check_length("split_context", length, world.size());
  hash_of_last_split() = hash_of(whole);
  return whole.index_select(
      dim, context::positions_of(length, world.rank(), world.size()).to(whole.device()));
}

at::Tensor context_positions(int64_t length, const comm::World& world, c10::Device device) {
  context::check_length("context_positions", length, world.size());
  return context::positions_of(length, world.rank(), world.size()).to(device);
}

at::Tensor gather_context(const at::Tensor& part, int64_t dim, const comm::World& world) {
  const at::NoGradGuard no_grad;
  const int64_t length = part.size(dim) * world.size();
  context::check_length("gather_context", length, world.size());
  const at::Tensor first = part.movedim(dim, 0).contiguous();
  return context::gather_alike(
             first, ranks_of(world),
             c10::str("gather_context of ", part.sizes(), " in ", part.scalar_type()))
      .flatten(0, 1)
      .index_select(0, context::places_of_positions(length, world.size()).to(part.device()))
      .movedim(0, dim);
}

}  // namespace zeropage::parallel
