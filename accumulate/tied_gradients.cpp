#include "accumulate/tied_gradients.h"

#include <algorithm>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "zeropage/check.h"
#include "zeropage/ledger.h"

namespace zeropage::accumulate {
namespace {

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

// Those of which both ranks have a gradient. A script may freeze a tied weight between two steps, on both.
std::vector<size_t> tied_pages(const zero::ParameterPages& pages,
                               const zero::StepGradients& gradients) {
  std::vector<size_t> tied, with_gradient;
  for (size_t index = 0; index < pages.parameters().size(); ++index) {
    if (pages.parameters()[index].parameter.is_tied) tied.push_back(index);
  }
  // Each rank has them in the order of its own layers.
  std::sort(tied.begin(), tied.end(), [&](size_t left, size_t right) {
    return pages.parameters()[left].parameter.name() < pages.parameters()[right].parameter.name();
  });
  std::vector<uint8_t> has;
  for (const size_t index : tied) has.push_back(gradients.has(index) ? 1 : 0);
  const c10::Device device = pages.part()->ranks.communicator().device();
  const at::Tensor own = at::tensor(has, at::kByte).to(device);
  const at::Tensor theirs = exchanged(*pages.part(), own, "which tied weights have a gradient");
  // In a simulated world the other says nothing.
  const at::Tensor others = theirs.is_meta() ? at::tensor(has, at::kByte) : theirs.cpu();
  for (size_t at = 0; at < tied.size(); ++at) {
    const zero::PlacedParameter& placed = pages.parameters()[tied[at]];
    const bool other_has = others.const_data_ptr<uint8_t>()[at] != 0;
    ZP_CHECK(other_has == (has[at] != 0), "step(): parameter \"", placed.parameter.name(),
             "\" is tied between the first and the last stage of the pipeline, but ",
             other_has ? "the other stage alone has" : "this stage alone has",
             " a gradient of it: expected that both use it in each step, or that it is frozen on "
             "both; use it in a layer of each, freeze it on both, or untie it");
    if (other_has) with_gradient.push_back(placed.page);
  }
  return with_gradient;
}

}  // namespace

void add_tied_gradients(const zero::ParameterPages& pages, zero::StepGradients& gradients) {
  const auto& part = pages.part();
  if (!part || !part->tied) return;
  const at::NoGradGuard no_grad;
  const std::vector<size_t> tied = tied_pages(pages, gradients);
  if (tied.empty()) return;
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

}  // namespace zeropage::accumulate
