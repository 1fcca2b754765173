#include "zero/update/frozen_states.h"

#include <algorithm>
#include <string>
#include <utility>

#include "zeropage/ledger.h"

namespace zeropage::zero {
namespace {

const at::Tensor* find(const std::vector<OwnedState::Tensor>& tensors, const std::string& name) {
  const auto at = std::find_if(tensors.begin(), tensors.end(),
                               [&](const auto& tensor) { return tensor.name == name; });
  return at == tensors.end() ? nullptr : &at->values;
}

void move_to_host(std::vector<OwnedState::Tensor>& tensors) {
  for (auto& [name, values] : tensors) values = values.cpu();
}

void copy_all(const std::vector<OwnedState::Tensor>& from,
              const std::vector<OwnedState::Tensor>& to) {
  for (const auto& [name, values] : to) {
    if (const at::Tensor* const known = find(from, name)) at::Tensor(values).copy_(*known);
  }
}

}  // namespace

void FrozenStates::keep(std::map<size_t, std::vector<OwnedState>> by_page) {
  const memory::KindScope kind(memory::Kind::kOptimizerState);
  by_page_ = std::move(by_page);
  for (auto& [page, states] : by_page_) {
    for (OwnedState& of : states) {
      move_to_host(of.tensors);
      move_to_host(of.whole_tensors);
      of.takes_others = false;
    }
  }
}

void FrozenStates::visit(const Visit& visit_state, const EndPage& end_page) {
  for (const auto& [page, states] : by_page_) {
    visit(page, visit_state);
    if (end_page) end_page(page);
  }
}

void FrozenStates::visit(size_t page, const Visit& visit) {
  const auto at = by_page_.find(page);
  if (at == by_page_.end()) return;
  for (OwnedState& state : at->second) visit(page, state);
}

void FrozenStates::visit_memory(const VisitMemory& visit) const {
  for (const auto& [page, states] : by_page_) {
    for (const OwnedState& state : states) {
      for (const auto& of : state.tensors) visit(of.values, memory::Kind::kOptimizerState);
      for (const auto& of : state.whole_tensors) visit(of.values, memory::Kind::kOptimizerState);
    }
  }
}

void FrozenStates::write_to(size_t page, OwnedState& state) const {
  for (const OwnedState& kept : by_page_.at(page)) {
    if (kept.parameter != state.parameter) continue;
    state.steps = kept.steps;
    if (state.takes_others) {
      state.tensors = kept.tensors;
    } else {
      copy_all(kept.tensors, state.tensors);
      copy_all(kept.whole_tensors, state.whole_tensors);
    }
  }
}

}  // namespace zeropage::zero
