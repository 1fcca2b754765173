#include "zero/gradients/tied_gradients.h"

#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "memory/check.h"
#include "memory/ledger.h"

namespace zeropage {
namespace {

std::vector<size_t> tied_pages(const ParameterPages& pages, const StepGradients& gradients) {
  std::vector<size_t> tied;
  for (size_t index = 0; index < pages.parameters().size(); ++index) {
    const PlacedParameter& placed = pages.parameters()[index];
    if (!placed.parameter.is_tied || !pages.layouts()[placed.page].requires_grad) continue;
    ZP_CHECK(gradients.has(index), "parameter \"", placed.parameter.name(),
             "\" is tied between the first and the last stage of the pipeline, but this stage has "
             "no gradient of it: expected that both use it in each step; use it, or untie it");
    tied.push_back(placed.page);
  }
  return tied;
}

// What the other of two ranks has of it.
at::Tensor exchanged(const ModelPart& part, const at::Tensor& own, const std::string& what) {
  const memory::KindScope kind(memory::Kind::kStaging);
  const comm::World& world = part.ranks.device().is_meta() ? part.ranks : *part.tied;
  // In a simulated world nobody is asked, and any other rank stands for it.
  const int other = world.rank() == 0 ? world.size() - 1 : 0;
  comm::Communicator& communicator = world.communicator();
  const at::Tensor theirs = at::empty_like(own);
  const auto send = [&] { communicator.send(own, other, what).wait(); };
  if (world.rank() == 0) send();
  communicator.recv(theirs, other, what).wait();
  if (world.rank() != 0) send();
  return theirs;
}

}  // namespace

void add_tied_gradients(const ParameterPages& pages, StepGradients& gradients) {
  const auto& part = pages.part();
  if (!part || !part->tied) return;
  const std::vector<size_t> tied = tied_pages(pages, gradients);
  if (tied.empty()) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> sums;
  for (const size_t page : tied) {
    gradients.arrival(page).synchronize();
    const at::Tensor own = gradients.owned(page).to(part->ranks.communicator().device());
    sums.push_back(own + exchanged(*part, own, "the gradient of " + pages.describe(page)));
  }
  for (size_t index = 0; index < tied.size(); ++index) {
    gradients.owned(tied[index]).copy_(sums[index]);
  }
  gradients.note_changed();
}

}  // namespace zeropage
