#include "parallel/context/operators.h"

#include <vector>

#include <ATen/ATen.h>
#include <torch/library.h>

#include "operators/operator_handle.h"
#include "parallel/context/chunks.h"
#include "parallel/context/ring.h"
#include "parallel/rank_operators.h"
#include "parallel/stamp.h"

namespace zeropage::parallel::context {
namespace {

RingOptions options_of(const std::optional<at::Tensor>& documents, double scale, bool is_causal,
                       const RanksPointer& ranks, const std::string& name) {
  RingOptions options{.scale = scale, .is_causal = is_causal, .documents = {}};
  if (documents) options.documents = gather_alike(*documents, ranks, name);
  return options;
}

std::tuple<at::Tensor, at::Tensor> compute_ring_forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& documents, int64_t /*length*/, double scale, bool is_causal,
    const RanksPointer& ranks, const std::string& name) {
  Attended attended = ring_attention(
      query, key, value, options_of(documents, scale, is_causal, ranks, name), ranks->world, name);
  return {std::move(attended.output), std::move(attended.log_sum)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> compute_ring_backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor& output, const at::Tensor& log_sum,
    const std::optional<at::Tensor>& documents, double scale, bool is_causal,
    const RanksPointer& ranks, const std::string& name) {
  AttentionGradients gradients = ring_attention_backward(
      gradient, query, key, value, {output, log_sum},
      options_of(documents, scale, is_causal, ranks, name), ranks->world, name);
  return {std::move(gradients.query), std::move(gradients.key), std::move(gradients.value)};
}

// Slice r of dimension 0 goes to rank r, and comes from there.
at::Tensor exchanged(const at::Tensor& given, const comm::World& world, const std::string& name) {
  Stamp stamp(name);
  const int64_t numel = given.numel() / given.size(0);
  const at::Tensor sent =
      at::empty({given.size(0), numel + Stamp::numel(given.scalar_type())}, given.options());
  sent.narrow(1, 0, numel).view(given.sizes()).copy_(given);
  for (int rank = 0; rank < world.size(); ++rank) stamp.put(sent[rank]);
  const at::Tensor received = at::empty_like(sent);
  world.communicator().all_to_all(sent.view(-1), received.view(-1), name).wait();
  for (int rank = 0; rank < world.size(); ++rank) stamp.note(received[rank], rank);
  stamp.check(world, kOtherAttention);
  return received.narrow(1, 0, numel).view(given.sizes());
}

at::Tensor compute_exchange_heads(const at::Tensor& given, bool to_heads, const RanksPointer& ranks,
                                  const std::string& name) {
  const comm::World& world = ranks->world;
  const int64_t count = world.size();
  if (to_heads) {
    // [ranks, batch, heads / P, length / P, size]: the heads of a rank; then the tokens of a rank.
    const at::Tensor by_heads = given.unflatten(1, {count, given.size(1) / count}).movedim(1, 0);
    const at::Tensor by_tokens = exchanged(by_heads, world, name);
    const at::Tensor behind = by_tokens.movedim(0, 2).flatten(2, 3);
    return behind.index_select(
        2, places_of_positions(behind.size(2), world.size()).to(given.device()));
  }
  std::vector<at::Tensor> by_tokens;
  for (int rank = 0; rank < world.size(); ++rank) {
    by_tokens.push_back(
        given.index_select(2, positions_of(given.size(2), rank, world.size()).to(given.device())));
  }
  return exchanged(at::stack(by_tokens), world, name).movedim(0, 1).flatten(1, 2);
}

at::Tensor compute_gather_alike(const at::Tensor& tensor, const RanksPointer& ranks,
                                const std::string& name) {
  const comm::World& world = ranks->world;
  std::vector<int64_t> sizes = {world.size()};
  sizes.insert(sizes.end(), tensor.sizes().begin(), tensor.sizes().end());
  at::Tensor all = at::empty(sizes, tensor.options());
  all[world.rank()].copy_(tensor);
  world.communicator().all_gather(all.view(-1), name).wait();
  return all;
}

TORCH_LIBRARY_FRAGMENT(zeropage, library) {
  register_ranks();
  library.def(
      "context_ring_forward(Tensor query, Tensor key, Tensor value, Tensor? documents, int "
      "length, float scale, bool is_causal, __torch__.torch.classes.zeropage.Ranks ranks, str "
      "name) -> (Tensor, Tensor)");
  library.def(
      "context_ring_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor "
      "output, "
      "Tensor log_sum, Tensor? documents, float scale, bool is_causal, "
      "__torch__.torch.classes.zeropage.Ranks ranks, str name) -> (Tensor, Tensor, Tensor)");
  library.def(
      "context_exchange_heads(Tensor given, bool to_heads, "
      "__torch__.torch.classes.zeropage.Ranks ranks, str name) -> Tensor");
  library.def(
      "context_gather_alike(Tensor tensor, __torch__.torch.classes.zeropage.Ranks ranks, str name) "
      "-> Tensor");
}

TORCH_LIBRARY_IMPL(zeropage, CompositeExplicitAutograd, library) {
  library.impl("context_ring_forward", &compute_ring_forward);
  library.impl("context_ring_backward", &compute_ring_backward);
  library.impl("context_exchange_heads", &compute_exchange_heads);
  library.impl("context_gather_alike", &compute_gather_alike);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> ring_forward(const at::Tensor& query, const at::Tensor& key,
                                                const at::Tensor& value,
                                                const std::optional<at::Tensor>& documents,
                                                double scale, bool is_causal,
                                                const RanksPointer& ranks,
                                                const std::string& name) {
  static const auto handle =
      operators::operator_of("zeropage::context_ring_forward", &compute_ring_forward);
  // Who counts operators' FLOPs learns from it how many keys meet the queries.
  const int64_t length = key.size(2) * ranks->world.size();
  return handle.call(query, key, value, documents, length, scale, is_causal, ranks, name);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> ring_backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor& output, const at::Tensor& log_sum,
    const std::optional<at::Tensor>& documents, double scale, bool is_causal,
    const RanksPointer& ranks, const std::string& name) {
  static const auto handle =
      operators::operator_of("zeropage::context_ring_backward", &compute_ring_backward);
  return handle.call(gradient, query, key, value, output, log_sum, documents, scale, is_causal,
                     ranks, name);
}

at::Tensor exchange_heads(const at::Tensor& given, bool to_heads, const RanksPointer& ranks,
                          const std::string& name) {
  static const auto handle =
      operators::operator_of("zeropage::context_exchange_heads", &compute_exchange_heads);
  return handle.call(given, to_heads, ranks, name);
}

at::Tensor gather_alike(const at::Tensor& tensor, const RanksPointer& ranks,
                        const std::string& name) {
  static const auto handle =
      operators::operator_of("zeropage::context_gather_alike", &compute_gather_alike);
  return handle.call(tensor, ranks, name);
}

}  // namespace zeropage::parallel::context
