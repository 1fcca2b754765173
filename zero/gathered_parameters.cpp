#include "zeropage/gathered_parameters.h"

#include <exception>
#include <memory>
#include <unordered_map>
#include <unordered_set>

#include "paging/pins.h"
#include "zero/model_parts.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/check.h"
#include "zeropage/distributed_data_parallel.h"
#include "zeropage/tensor_parallel.h"

namespace zeropage {
namespace {

std::vector<size_t> indices_of(const zero::ParameterPages& pages,
                               const std::vector<at::Tensor>& tensors, const char* who) {
  std::vector<size_t> indices;
  for (size_t position = 0; position < tensors.size(); ++position) {
    const int64_t index = pages.parameters().index_of(tensors[position]);
    ZP_CHECK(index >= 0, who, ": tensor ", position, " (sizes ", tensors[position].sizes(),
             ") is not a parameter of the wrapped module; give parameters themselves, not views");
    indices.push_back(static_cast<size_t>(index));
  }
  return indices;
}

std::vector<at::Tensor> tensors_of_all(const ModelRef& model) {
  std::vector<at::Tensor> tensors;
  for (const zero::PlacedParameter& placed : model->parameters()) {
    tensors.push_back(placed.parameter.tensor);
  }
  return tensors;
}

// Whether a rank of the model's world has some of the slices.
bool has_slice(const zero::ParameterSlice& slice, const comm::World& world, int rank) {
  for (int other = 0; other < slice.ranks.size(); ++other) {
    if (slice.ranks.global_rank(other) == world.global_rank(rank)) return true;
  }
  return false;
}

}  // namespace

std::optional<int> Modified::only_rank() const {
  return where_ == Where::kOneRank ? std::optional<int>(rank_) : std::nullopt;
}

struct GatheredParameters::Held {
  Held(const ModelRef& model, const std::vector<at::Tensor>& parameters, const Modified& modified);
  ~Held() noexcept(false);
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  const std::shared_ptr<const zero::WholePages> paging;
  const std::shared_ptr<const zero::ModulePlacement> in_place;
  const std::shared_ptr<zero::PageWrites> writes;
  const std::shared_ptr<zero::GradientReducer> reducer;
  const Modified modified;
  const int exceptions;
  std::vector<size_t> gathered_pages;
  paging::Pins pins;
};

GatheredParameters::Held::Held(const ModelRef& model, const std::vector<at::Tensor>& parameters,
                               const Modified& modified)
    : paging(model->sharded().paging),
      in_place(model->sharded().in_place),
      writes(model->sharded().writes),
      reducer(model->sharded().reducer),
      modified(modified),
      exceptions(std::uncaught_exceptions()) {
  model->sharded().memory->check_not_parked("GatheredParameters");
  const auto root = modified.only_rank();
  ZP_CHECK(!root || (*root >= 0 && *root < model->world().size()),
           "GatheredParameters: Modified::on_rank(", *root, "): expected a rank below ",
           model->world().size());
  const zero::ParameterPages& pages = *model->sharded().pages;
  std::unordered_set<size_t> seen;
  for (const size_t index : indices_of(pages, parameters, "GatheredParameters")) {
    const zero::NamedParameter& parameter = pages.parameters()[index].parameter;
    ZP_CHECK(
        !root || !parameter.is_of_experts(), "GatheredParameters: Modified::on_rank(", *root,
        "): parameter \"", parameter.name(), "\" is cut over ",
        parameter.is_of_experts() ? parameter.slice->ranks.size() : 1,
        " ranks, and that rank has some of its experts alone; give the guard a list of the other "
        "parameters, write experts before expert_parallel(), or load them by load_weights()");
    paging->add_to(pins, index, modified.anywhere());
    const size_t page = pages.parameters()[index].page;
    if (seen.insert(page).second) gathered_pages.push_back(page);
  }
  if (!pins.empty()) pins.take_outside_trace("GatheredParameters");
}

GatheredParameters::Held::~Held() noexcept(false) {
  if (!modified.anywhere()) return;
  const std::string wrong = in_place->put_back(gathered_pages);
  reducer->training().restore_hooks(gathered_pages);
  if (std::uncaught_exceptions() > exceptions) return;
  if (const auto root = modified.only_rank()) {
    std::vector<comm::Pending> in_flight;
    for (const size_t page : gathered_pages) {
      in_flight.push_back(paging->start_broadcast(page, *root));
    }
    for (const comm::Pending& pending : in_flight) pending.wait();
  }
  writes->note_written(gathered_pages);
  ZP_CHECK(wrong.empty(), "GatheredParameters: ", wrong);
}

GatheredParameters::GatheredParameters(const ModelRef& model, const Modified& modified)
    : GatheredParameters(model, tensors_of_all(model), modified) {}

GatheredParameters::GatheredParameters(const ModelRef& model,
                                       const std::vector<at::Tensor>& parameters,
                                       const Modified& modified)
    : held_(new Held(model, parameters, modified)) {}

GatheredParameters::~GatheredParameters() noexcept(false) {
  delete held_;
}

GatheredGradients::GatheredGradients(const ModelRef& model)
    : GatheredGradients(model, tensors_of_all(model)) {}

GatheredGradients::GatheredGradients(const ModelRef& model,
                                     const std::vector<at::Tensor>& parameters)
    : pins_(nullptr) {
  const zero::ShardedModel& sharded = model->sharded();
  auto pins = std::make_unique<paging::Pins>();
  sharded.gradients->gather(indices_of(*sharded.pages, parameters, "GatheredGradients"), *pins);
  pins_ = pins.release();
}

GatheredGradients::~GatheredGradients() noexcept(false) {
  delete pins_;
}

void visit_parameters(const DistributedDataParallelBase& model,
                      const std::function<void(const std::string&, const at::Tensor&)>& visit) {
  const zero::ParameterPages& pages = *sharded_parameters_of(model).pages;
  std::optional<GatheredParameters> guard;
  size_t gathered = pages.layouts().size();
  for (const auto& parameter : model.named_parameters()) {
    const auto index = static_cast<size_t>(pages.parameters().index_of(parameter.value()));
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
  const zero::PlacedParameters& placed = sharded_parameters_of(model).pages->parameters();
  visit_parameters(model, [&](const std::string& name, const at::Tensor& values) {
    const bool wanted = model.world().rank() == rank;
    const auto index = static_cast<size_t>(placed.index_of(parameters[name]));
    const zero::NamedParameter& parameter = placed[index].parameter;
    // The other ranks along "expert" give theirs.
    const bool gives =
        parameter.is_of_experts() && has_slice(*parameter.slice, model.world(), rank);
    if (!wanted && !gives) return;
    at::Tensor& copy = copies[parameters[name].unsafeGetTensorImpl()];
    if (!copy.defined()) copy = whole_of(values);
    if (wanted) state.insert(name, copy);
  });
  for (const auto& buffer : model.named_buffers()) {
    if (model.world().rank() == rank) state.insert(buffer.key(), buffer.value().clone());
  }
  return state;
}

}  // namespace zeropage
