#include <optional>
#include <unordered_map>

#include <ATen/ATen.h>

#include "zeropage/gathered_parameters.h"
#include "zeropage/ledger.h"
#include "zeropage/pipeline.h"

namespace zeropage {
namespace {

// From the rank that has it to all.
at::Tensor sent_to_all(const comm::World& ranks, int owner, const at::Tensor& own,
                       const std::string& name) {
  const memory::KindScope kind(memory::Kind::kStaging);
  comm::Communicator& communicator = ranks.communicator();
  at::Tensor shape = at::zeros({2}, at::kLong);
  if (own.defined()) {
    shape[0] = static_cast<int64_t>(own.scalar_type());
    shape[1] = own.numel();
  }
  const at::Tensor there = shape.to(ranks.device());
  communicator.broadcast(there, owner, "the size of parameter \"" + name + "\"").wait();
  shape = there.to(at::kCPU);
  const auto dtype = static_cast<at::ScalarType>(shape[0].item<int64_t>());
  at::Tensor values = own.defined() ? own.contiguous().view({-1})
                                    : at::empty({shape[1].item<int64_t>()},
                                                at::TensorOptions(ranks.device()).dtype(dtype));
  communicator.broadcast(values, owner, "parameter \"" + name + "\"").wait();
  return values;
}

}  // namespace

void visit_whole_model(const Pipeline::Model& model,
                       const std::function<void(const std::string&, const at::Tensor&)>& visit) {
  const at::NoGradGuard no_grad;
  const ModelPart& part = *model->model_part();
  std::unordered_map<size_t, at::Tensor> own;  // by place in the model
  for (const at::Tensor& tensor : model.parameters()) {
    own[part.own.at(tensor.unsafeGetTensorImpl())] = tensor;
  }
  for (size_t place = 0; place < part.parameters.size(); ++place) {
    const TensorOfModel& of = part.parameters[place];
    const bool has = of.rank == part.ranks.rank();
    std::optional<GatheredParameters> whole;
    if (has) whole.emplace(model, std::vector<at::Tensor>{own.at(place)});
    const at::Tensor values =
        sent_to_all(part.ranks, of.rank, has ? own.at(place).detach() : at::Tensor(), of.name());
    for (const std::string& name : of.names) visit(name, values);
  }
}

}  // namespace zeropage
