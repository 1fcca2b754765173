#include "zero/update/step_pipeline.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "device/named_range.h"
#include "zeropage/check.h"
#include "zeropage/event_sink.h"
#include "zeropage/ledger.h"

namespace zeropage::zero {

StepPipeline::StepPipeline(ShardedModel parameters, const ParameterGroups& groups,
                           PageUpdates& updates, const UpdateAlgorithm& algorithm)
    : parameters_(std::move(parameters)),
      groups_(groups),
      updates_(updates),
      tensors_(algorithm.tensors
                   ? std::make_unique<TensorPasses>(parameters_, groups_, updates_, algorithm)
                   : nullptr) {
  if (updates_.steps() != nullptr) follow_backward();
}

StepPipeline::~StepPipeline() {
  if (!follows_) return;
  parameters_.reducer->set_on_reduced({});
  parameters_.pages->page_offload()->gradients().set_before_write({});
}

void StepPipeline::follow_backward() {
  const StepWhen when = parameters_.options.offload.step;
  TierStorage& gradients = parameters_.pages->page_offload()->gradients();
  ZP_CHECK(
      when == StepWhen::kInStep ||
          (!parameters_.reducer->on_reduced() && !gradients.has_before_write()),
      "options.offload.step: another optimizer of this model follows backward already; make one "
      "optimizer with several parameter groups, or use StepWhen::kInStep");
  follows_ = when != StepWhen::kInStep;
  if (when == StepWhen::kInBackward) {
    parameters_.reducer->set_on_reduced([this](size_t page, const HasGradient& has, double factor) {
      start_in_backward(page, has, factor);
    });
  } else if (when == StepWhen::kOneStepLate) {
    // The update of the step before reads them.
    gradients.set_before_write([this](size_t page) {
      if (const OfPage* const of_page = updates_.offloaded(page)) {
        updates_.steps()->wait(*of_page->part);
      }
    });
  }
}

void StepPipeline::start_in_backward(size_t page, const HasGradient& has_gradient, double factor) {
  // What was added since the last step is updated with this one.
  updates_.adopt_groups();
  const OfPage* const of_page = updates_.offloaded(page);
  if (of_page == nullptr) return;
  parameters_.writes->begin_update_in_backward(page, has_gradient);
  start_offloaded(*of_page, has_gradient, factor, /*directions=*/{},
                  in_backward_before_update(page));
}

// An accumulation reports the norm of gradients that are gone by then.
StepPipeline::BeforeUpdate StepPipeline::in_backward_before_update(size_t page) const {
  const bool is_reported = parameters_.reducer->plan().accumulates() &&
                           parameters_.gradients->is_offloaded(page) &&
                           !parameters_.pages->world().device().is_meta();
  if (!is_reported) {
    parameters_.sums->forget_passing(page);
    return nullptr;
  }
  return parameters_.sums->note_passing(page);
}

OffloadedSteps::Gradient StepPipeline::gradient_of(size_t page) const {
  const StepGradients& gradients = *parameters_.gradients;
  if (gradients.is_offloaded(page)) return {.arrival = gradients.arrival(page), .on_device = {}};
  return {.arrival = {}, .on_device = gradients.owned(page)};
}

// has_gradient: asked here only.
void StepPipeline::start_offloaded(const OfPage& of_page, const HasGradient& has_gradient,
                                   double factor, const Directions& directions,
                                   BeforeUpdate before_update) const {
  const ParameterPages& pages = *parameters_.pages;
  const Range owned = pages.owned(of_page.page);
  std::vector<size_t> with_gradient;  // ascending
  std::vector<Range> unchanged;
  for (const size_t index : pages.parameters().of_page(of_page.page)) {
    if (groups_.contain(index) && has_gradient(index)) {
      with_gradient.push_back(index);
      continue;
    }
    const Range range = intersection(owned, pages.parameters()[index].range);
    if (range.empty()) continue;
    unchanged.push_back({range.begin - owned.begin, range.end - owned.begin});
  }
  updates_.set_options(of_page);
  updates_.steps()->start(
      *of_page.part,
      [update = of_page.update.get(), with_gradient = std::move(with_gradient), factor, directions,
       before_update = std::move(before_update)](const at::Tensor& gradient) {
        if (before_update) before_update(gradient);
        const auto has = [&with_gradient](size_t parameter) {
          return std::binary_search(with_gradient.begin(), with_gradient.end(), parameter);
        };
        update->step(gradient, has, {.scale = factor}, directions);
      },
      gradient_of(of_page.page), std::move(unchanged));
}

void StepPipeline::update_on_device(const OfPage& of_page, const HasGradient& has_gradient,
                                    const optim::GradientFactors& factors,
                                    const Directions& directions) const {
  updates_.set_options(of_page);
  const memory::OwnerScope owner("optimizer", parameters_.pages->layouts()[of_page.page].name);
  try {
    of_page.update->step(parameters_.gradients->owned(of_page.page), has_gradient, factors,
                         directions);
  } catch (c10::Error& error) {
    error.add_context(c10::str(memory::owner_prefix(), "updating page \"",
                               parameters_.pages->layouts()[of_page.page].name, "\""));
    throw;
  }
}

void StepPipeline::run_in_buckets(const HasGradient& has_gradient,
                                  const optim::GradientFactors& factors,
                                  std::vector<comm::Pending>& in_flight) const {
  tensors_->run(has_gradient, factors,
                [&](const MatrixBucket& bucket, const std::vector<Directions>& directions) {
                  const auto for_each_page = [&](const auto& visit) {
                    for (size_t at = bucket.first_page; at < bucket.end_page; ++at) {
                      visit(updates_.all()[at], directions[at - bucket.first_page]);
                    }
                  };
                  for_each_page([&](const OfPage& of_page, const Directions& of) {
                    if (of_page.part) start_offloaded(of_page, has_gradient, factors.scale, of);
                  });
                  for_each_page([&](const OfPage& of_page, const Directions& of) {
                    if (of_page.part) {
                      updates_.steps()->take(*of_page.part);
                    } else {
                      update_on_device(of_page, has_gradient, factors, of);
                    }
                    in_flight.push_back(parameters_.memory->start_gather(of_page.page));
                  });
                });
}

void StepPipeline::run(const HasGradient& has_gradient,
                       const optim::GradientFactors& factors) const {
  const device::NamedRange range("StepPipeline::run");
  std::vector<comm::Pending> in_flight;
  if (tensors_) {
    run_in_buckets(has_gradient, factors, in_flight);
  } else {
    run_at_once(has_gradient, factors, in_flight);
  }
  const memory::OwnerScope owner("updated parameters");
  for (const comm::Pending& pending : in_flight) pending.wait();
}

void StepPipeline::run_at_once(const HasGradient& has_gradient,
                               const optim::GradientFactors& factors,
                               std::vector<comm::Pending>& in_flight) const {
  const bool late = parameters_.options.offload.step == StepWhen::kOneStepLate;
  OffloadedSteps* const steps = updates_.steps();
  for (const OfPage& of_page : updates_.all()) {
    if (!of_page.part) continue;
    if (late && steps->started(*of_page.part)) {
      steps->take(*of_page.part);
      steps->publish(*of_page.part);
    }
    if (!steps->started(*of_page.part)) {
      start_offloaded(of_page, has_gradient, factors.scale);
    }
  }
  for (const OfPage& of_page : updates_.all()) {
    if (!of_page.part) {
      update_on_device(of_page, has_gradient, factors);
    } else if (!late) {
      steps->take(*of_page.part);
    }
    in_flight.push_back(parameters_.memory->start_gather(of_page.page));
  }
}

}  // namespace zeropage::zero
