#include "zero/update/option_words.h"

#include <optional>
#include <sstream>
#include <tuple>
#include <typeinfo>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include "zero/agreement/agreement_hashes.h"
#include "zero/update/archive_values.h"
#include "zeropage/adafactor.h"
#include "zeropage/lamb.h"
#include "zeropage/lion.h"
#include "zeropage/muon.h"

namespace zeropage::zero {
namespace {

using torch::optim::OptimizerOptions;

template <typename... Numbers>
uint64_t hash_of_numbers(const Numbers&... numbers) {
  Fingerprint hash;
  (hash.add(static_cast<double>(numbers)), ...);
  return hash.value();
}

template <typename O>
uint64_t hash_of_adam(const O& options) {
  const auto [first, second] = options.betas();
  return hash_of_numbers(options.lr(), first, second, options.eps(), options.weight_decay(),
                         options.amsgrad());
}

uint64_t hash_of_muon(const MuonOptions& options) {
  const auto [a, b, c] = options.ns_coefficients();
  const auto [first, second] = options.betas();
  Fingerprint hash;
  for (const int64_t rows : options.row_blocks()) hash.add(static_cast<double>(rows));
  hash.add(hash_of_numbers(static_cast<int>(options.rule()), options.lr(), options.weight_decay(),
                           options.momentum(), options.nesterov(), a, b, c, options.ns_steps(),
                           options.ns_eps(), static_cast<int>(options.ns_dtype()),
                           static_cast<int>(options.scale()), static_cast<int>(options.matrices()),
                           options.takes_embeddings(), first, second, options.eps()));
  return hash.value();
}

// A class that is derived from one of these may have more.
template <typename O>
const O* as(const OptimizerOptions& options) {
  return typeid(options) == typeid(O) ? static_cast<const O*>(&options) : nullptr;
}

std::optional<uint64_t> hash_of_known(const OptimizerOptions& options) {
  if (const auto* adam = as<torch::optim::AdamWOptions>(options)) return hash_of_adam(*adam);
  if (const auto* adam = as<torch::optim::AdamOptions>(options)) return hash_of_adam(*adam);
  if (const auto* sgd = as<torch::optim::SGDOptions>(options)) {
    return hash_of_numbers(sgd->lr(), sgd->momentum(), sgd->dampening(), sgd->weight_decay(),
                           sgd->nesterov());
  }
  if (const auto* lion = as<LionOptions>(options)) {
    const auto [first, second] = lion->betas();
    return hash_of_numbers(lion->lr(), first, second, lion->weight_decay());
  }
  if (const auto* lamb = as<LambOptions>(options)) {
    const auto [first, second] = lamb->betas();
    return hash_of_numbers(lamb->lr(), first, second, lamb->eps(), lamb->weight_decay(),
                           lamb->trust_ratio());
  }
  if (const auto* adafactor = as<AdafactorOptions>(options)) {
    const auto [root, least] = adafactor->eps();
    return hash_of_numbers(adafactor->lr(), adafactor->beta2_decay(), root, least, adafactor->d(),
                           adafactor->weight_decay());
  }
  if (const auto* muon = as<MuonOptions>(options)) return hash_of_muon(*muon);
  if (const auto* adagrad = as<torch::optim::AdagradOptions>(options)) {
    return hash_of_numbers(adagrad->lr(), adagrad->lr_decay(), adagrad->weight_decay(),
                           adagrad->initial_accumulator_value(), adagrad->eps());
  }
  if (const auto* rmsprop = as<torch::optim::RMSpropOptions>(options)) {
    return hash_of_numbers(rmsprop->lr(), rmsprop->alpha(), rmsprop->eps(), rmsprop->weight_decay(),
                           rmsprop->momentum(), rmsprop->centered());
  }
  return std::nullopt;
}

// A class of the user's need not know how.
std::optional<std::string> saved(const OptimizerOptions& options) {
  try {
    torch::serialize::OutputArchive archive;
    options.serialize(archive);
    std::ostringstream out;
    archive.save_to(out);
    return out.str();
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

std::optional<double> learning_rate(const OptimizerOptions& options) {
  try {
    return options.get_lr();
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace

std::vector<std::pair<std::string, std::string>> option_words(const OptimizerOptions& options) {
  std::vector<std::pair<std::string, std::string>> words;
  try {
    const nlohmann::json values =
        saved_json("options", [&](auto& archive) { options.serialize(archive); });
    for (const auto& [name, value] : values.items()) words.emplace_back(name, value.dump());
  } catch (const std::exception&) {
    if (const auto rate = learning_rate(options)) words.emplace_back("lr", c10::str(*rate));
  }
  return words;
}

uint64_t OptionsHash::of(const OptimizerOptions& options, const OptionsClass& of_class) {
  if (const auto known = hash_of_known(options)) return *known;
  const std::string_view bytes = of_class.memory_of(options);
  if (!bytes.empty() && bytes == bytes_) return hash_;
  bytes_ = bytes;
  Fingerprint hash;
  const std::optional<std::string> text = saves_ ? saved(options) : std::nullopt;
  saves_ = text.has_value();
  if (text) hash.add(*text);
  if (!text) hash.add(learning_rate(options).value_or(0));
  hash_ = hash.value();
  return hash_;
}

}  // namespace zeropage::zero
