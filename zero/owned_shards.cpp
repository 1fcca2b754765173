#include "zeropage/owned_shards.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include "optim/split_values.h"
#include "zero/agreement/new_values.h"
#include "zero/model_parts.h"
#include "zero/owned_values.h"
#include "zero/setup/sharded_model.h"
#include "zero/update/sharded_updates.h"
#include "zeropage/check.h"

namespace zeropage {
namespace {

// A copy whose in-place operators throw: LibTorch writes before it throws, so it must not be this rank's own
// memory. flat: [numel].
at::Tensor read_only(const at::Tensor& flat) {
  const c10::InferenceMode inference;
  return flat.clone();
}

// Reads one page while its memory is there.
class PageReader {
 public:
  PageReader(const ModelRef& model, ShardedOptimizer* optimizer)
      : sharded_(model->sharded()),
        pages_(*sharded_.pages),
        parameters_(model->parameters()),
        optimizer_(optimizer) {
    if (sharded_.gradients->are_averaged()) sharded_.gradients->prepare();
  }

  // parameters: of the page.
  void read(size_t page, const std::vector<size_t>& parameters, const VisitOwnedShard& visit) {
    sharded_.writes->take_over(page);
    sharded_.masters->visit_owned(page, zero::TierStorage::Use::kRead, [&](const auto& owned) {
      // The states of each parameter, in pieces that follow each other where a class keeps them so.
      std::unordered_map<size_t, std::vector<zero::OwnedState>> states;
      const auto visit_parameters = [&](size_t) {
        for (const size_t index : parameters) visit(shard_of(index, owned, states[index]));
      };
      if (optimizer_ == nullptr) return visit_parameters(page);
      updates_of(*optimizer_)
          .visit_states_of(
              page, zero::StateAccess::kRead,
              [&](size_t, zero::OwnedState& state) { states[state.parameter].push_back(state); },
              visit_parameters);
    });
  }

 private:
  OwnedShard shard_of(size_t index, const zero::MasterWeights::Owned& owned,
                      const std::vector<zero::OwnedState>& states) const {
    const zero::PlacedParameter& placed = parameters_[index];
    const Range own = pages_.owned(placed.page);
    Range here = intersection(own, placed.range);
    OwnedShard shard{.name = placed.parameter.name(),
                     .is_slice = placed.parameter.slice.has_value()};
    if (here.empty()) {
      here = {own.begin, own.begin};
    } else {
      shard.range = {here.begin - placed.range.begin, here.end - placed.range.begin};
    }
    const auto part = [&](const at::Tensor& of_owned) {
      return read_only(of_owned.narrow(0, here.begin - own.begin, here.numel()));
    };
    shard.values = part(owned.values);
    shard.exact = exact_values(shard.values, owned, part);
    if (sharded_.gradients->are_averaged() && sharded_.gradients->has(index)) {
      shard.gradient = part(sharded_.gradients->owned(placed.page));
    }
    add_states(shard, states);
    return shard;
  }

  template <typename Part>
  at::Tensor exact_values(const at::Tensor& values, const zero::MasterWeights::Owned& owned,
                          const Part& part) const {
    if (!is_low_precision(values.scalar_type())) return values;
    if (owned.copy.defined()) return part(owned.copy);
    if (!owned.remainders.defined()) return values;
    const c10::InferenceMode inference;
    return optim::joined_values(values, part(owned.remainders));
  }

  static void add_states(OwnedShard& shard, const std::vector<zero::OwnedState>& states) {
    std::map<std::string, std::vector<at::Tensor>> pieces;
    for (const zero::OwnedState& state : states) {
      shard.steps = state.steps;
      for (const auto& [name, values] : state.tensors) pieces[name].push_back(values);
    }
    for (const auto& [name, of_state] : pieces) {
      const c10::InferenceMode inference;
      shard.states[name] = of_state.size() == 1 ? read_only(of_state.front()) : at::cat(of_state);
    }
  }

  const zero::ShardedModel& sharded_;
  const zero::ParameterPages& pages_;
  const zero::PlacedParameters& parameters_;
  ShardedOptimizer* const optimizer_;
};

void check_is_of(const ShardedOptimizer* optimizer, const ModelRef& model, const char* who) {
  ZP_CHECK(optimizer == nullptr || updates_of(*optimizer).updates(*model->sharded().pages), who,
           ": the optimizer is of another model; give this one's");
}

OwnedShard read_one(const ModelRef& model, ShardedOptimizer* optimizer,
                    const at::Tensor& parameter) {
  const at::NoGradGuard no_grad;
  constexpr const char* kWho = "owned_shard()";
  zero::check_values_can_be_read(model, kWho);
  check_is_of(optimizer, model, kWho);
  const zero::ParameterPages& pages = *model->sharded().pages;
  const int64_t index = pages.parameters().index_of(parameter);
  ZP_CHECK(index >= 0, kWho, ": a tensor ",
           parameter.defined() ? c10::str("of sizes ", parameter.sizes()) : "that is undefined",
           " is no parameter of the wrapped module; give the parameter itself, not a view");
  OwnedShard found;
  PageReader(model, optimizer)
      .read(pages.parameters()[static_cast<size_t>(index)].page, {static_cast<size_t>(index)},
            [&](const OwnedShard& shard) { found = shard; });
  return found;
}

void read_all(const ModelRef& model, ShardedOptimizer* optimizer, const VisitOwnedShard& visit,
              const char* who) {
  const at::NoGradGuard no_grad;
  zero::check_values_can_be_read(model, who);
  check_is_of(optimizer, model, who);
  PageReader reader(model, optimizer);
  const zero::ParameterPages& pages = *model->sharded().pages;
  for (size_t page = 0; page < pages.layouts().size(); ++page) {
    reader.read(page, pages.parameters().of_page(page), visit);
  }
}

at::Tensor checked(const OwnedShard& shard, const at::Tensor& given) {
  if (!given.defined()) return given;
  ZP_CHECK(given.dim() == 1 && given.numel() == shard.range.numel() && given.is_floating_point(),
           "parameter \"", shard.name, "\": expected new values of sizes [", shard.range.numel(),
           "] of floating point, as many as this rank owns of it, got ", given.scalar_type(), " ",
           given.sizes());
  return given;
}

void write_page(const ModelRef& model, size_t page,
                const std::map<std::string, at::Tensor>& given) {
  const zero::ShardedModel& sharded = model->sharded();
  const Range own = sharded.pages->owned(page);
  sharded.masters->visit_owned(page, zero::TierStorage::Use::kWrite, [&](const auto& owned) {
    for (const size_t index : model->parameters().of_page(page)) {
      const zero::PlacedParameter& placed = model->parameters()[index];
      const Range here = intersection(own, placed.range);
      if (here.empty()) continue;
      const at::Tensor& values = given.at(placed.parameter.name());
      if (!values.defined()) continue;
      const auto part = [&](const at::Tensor& of_owned) {
        return of_owned.narrow(0, here.begin - own.begin, here.numel());
      };
      if (owned.remainders.defined()) {
        const optim::SplitValues split =
            optim::split_values(values.to(owned.values.device(), at::kFloat));
        part(owned.values).copy_(split.high);
        part(owned.remainders).copy_(split.low);
        continue;
      }
      part(owned.values).copy_(values);
      if (owned.copy.defined()) part(owned.copy).copy_(values);
    }
  });
}

}  // namespace

OwnedShard owned_shard(const ModelRef& model, const at::Tensor& parameter) {
  return read_one(model, nullptr, parameter);
}

OwnedShard owned_shard(const ModelRef& model, ShardedOptimizer& optimizer,
                       const at::Tensor& parameter) {
  return read_one(model, &optimizer, parameter);
}

void visit_owned_shards(const ModelRef& model, const VisitOwnedShard& visit) {
  read_all(model, nullptr, visit, "visit_owned_shards()");
}

void visit_owned_shards(const ModelRef& model, ShardedOptimizer& optimizer,
                        const VisitOwnedShard& visit) {
  read_all(model, &optimizer, visit, "visit_owned_shards()");
}

void assign_owned_shards(const ModelRef& model, const NewShardValues& new_values) {
  const at::NoGradGuard no_grad;
  constexpr const char* kWho = "assign_owned_shards()";
  const zero::ShardedModel& sharded = model->sharded();
  std::map<std::string, at::Tensor> given;
  std::exception_ptr error;
  std::string message, values;
  try {
    read_all(
        model, nullptr,
        [&](const OwnedShard& shard) { given[shard.name] = checked(shard, new_values(shard)); },
        kWho);
    sharded.writes->take_over(kWho);
    values = std::to_string(sharded.agreement->hashes_now().values);
  } catch (const std::exception& caught) {
    error = std::current_exception();
    message = memory::message_of(caught);
  }
  const std::vector<std::string> messages = model->world().gather_text(kWho, message);
  if (error) std::rethrow_exception(error);
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    ZP_CHECK(messages[rank].empty(), kWho, ": nothing was assigned, as rank ", rank,
             " said: ", messages[rank]);
  }
  const zero::NewValues alike(*sharded.pages, given);
  // What one rank wrote alone: from here on nobody compares it any more.
  std::vector<std::string> written = model->world().gather_text(kWho, values + "\n" + alike.text());
  std::vector<std::string> assigned;
  for (std::string& text : written) {
    const size_t end = text.find('\n');
    assigned.push_back(text.substr(end + 1));
    text.resize(end);
  }
  if (std::adjacent_find(written.begin(), written.end(), std::not_equal_to<>()) != written.end()) {
    sharded.agreement->settle(model->world(), kWho);
  }
  alike.check_alike(assigned, kWho);
  const size_t count = sharded.pages->layouts().size();
  for (size_t page = 0; page < count; ++page) write_page(model, page, given);
  for (size_t page = 0; page < count; ++page) sharded.memory->start_gather_shards(page).wait();
  sharded.writes->end_load();
}

}  // namespace zeropage
