#include "zero/gathered_parameters.h"

#include <algorithm>
#include <exception>
#include <unordered_map>

#include "memory/check.h"

namespace zeropage {
namespace {

std::vector<size_t> indices_of(const ParameterPages& pages, const std::vector<at::Tensor>& tensors,
                               const char* who) {
  std::vector<size_t> indices;
  for (size_t position = 0; position < tensors.size(); ++position) {
    const int64_t index = pages.index_of(tensors[position]);
    ZP_CHECK(index >= 0, who, ": tensor ", position, " (sizes ", tensors[position].sizes(),
             ") is not a parameter of the wrapped module; give parameters themselves, not views");
    indices.push_back(static_cast<size_t>(index));
  }
  return indices;
}

}  // namespace

GatheredParameters::GatheredParameters(const DistributedDataParallelBase& model,
                                       const Modified& modified)
    : GatheredParameters(model, model.parameters(), modified) {}

GatheredParameters::GatheredParameters(const DistributedDataParallelBase& model,
                                       const std::vector<at::Tensor>& parameters,
                                       const Modified& modified)
    : paging_(model.sharded_parameters().paging),
      in_place_(model.sharded_parameters().in_place),
      writes_(model.sharded_parameters().writes),
      reducer_(model.sharded_parameters().reducer),
      modified_(modified),
      exceptions_(std::uncaught_exceptions()) {
  const auto root = modified.only_rank();
  ZP_CHECK(!root || (*root >= 0 && *root < model.world().size()),
           "GatheredParameters: Modified::on_rank(", *root, "): expected a rank below ",
           model.world().size());
  const ParameterPages& pages = *model.sharded_parameters().pages;
  for (const size_t index : indices_of(pages, parameters, "GatheredParameters")) {
    paging_->add_to(pins_, index, modified.anywhere());
    const size_t page = pages.parameters()[index].page;
    if (std::find(gathered_pages_.begin(), gathered_pages_.end(), page) == gathered_pages_.end()) {
      gathered_pages_.push_back(page);
    }
  }
  if (!pins_.empty()) pins_.take_aside("GatheredParameters");
}

GatheredParameters::~GatheredParameters() noexcept(false) {
  if (!modified_.anywhere()) return;
  const std::string wrong = in_place_->put_back(gathered_pages_);
  reducer_->training().restore_hooks();
  if (std::uncaught_exceptions() > exceptions_) return;
  if (const auto root = modified_.only_rank()) {
    std::vector<comm::Pending> in_flight;
    for (const size_t page : gathered_pages_) {
      in_flight.push_back(paging_->start_broadcast(page, *root));
    }
    for (const comm::Pending& pending : in_flight) pending.wait();
  }
  writes_->note_written(gathered_pages_);
  ZP_CHECK(wrong.empty(), "GatheredParameters: ", wrong);
}

GatheredGradients::GatheredGradients(const DistributedDataParallelBase& model)
    : GatheredGradients(model, model.parameters()) {}

GatheredGradients::GatheredGradients(const DistributedDataParallelBase& model,
                                     const std::vector<at::Tensor>& parameters) {
  const ShardedParameters& sharded = model.sharded_parameters();
  sharded.gradients->gather(indices_of(*sharded.pages, parameters, "GatheredGradients"), pins_);
}

void visit_parameters(const DistributedDataParallelBase& model,
                      const std::function<void(const std::string&, const at::Tensor&)>& visit) {
  const ParameterPages& pages = *model.sharded_parameters().pages;
  std::optional<GatheredParameters> guard;
  size_t gathered = pages.layouts().size();
  for (const auto& parameter : model.named_parameters()) {
    const auto index = static_cast<size_t>(pages.index_of(parameter.value()));
    const size_t page = pages.parameters()[index].page;
    // Its neighbours are in the same page.
    if (page != gathered) {
      guard.reset();
      guard.emplace(model, std::vector<at::Tensor>{parameter.value()});
      gathered = page;
    }
    visit(parameter.key(), parameter.value().detach());
  }
}

torch::OrderedDict<std::string, at::Tensor> full_state(const DistributedDataParallelBase& model,
                                                       int rank) {
  ZP_CHECK(rank >= 0 && rank < model.world().size(), "full_state: expected a rank below ",
           model.world().size(), ", got ", rank);
  const torch::NoGradGuard no_grad;
  torch::OrderedDict<std::string, at::Tensor> state;
  const auto parameters = model.named_parameters();
  std::unordered_map<const c10::TensorImpl*, at::Tensor> copies;
  visit_parameters(model, [&](const std::string& name, const at::Tensor& values) {
    if (model.world().rank() != rank) return;
    at::Tensor& copy = copies[parameters[name].unsafeGetTensorImpl()];
    if (!copy.defined()) copy = values.clone();
    state.insert(name, copy);
  });
  for (const auto& buffer : model.named_buffers()) {
    if (model.world().rank() == rank) state.insert(buffer.key(), buffer.value().clone());
  }
  return state;
}

}  // namespace zeropage
