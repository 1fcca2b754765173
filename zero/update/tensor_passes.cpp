#include "zero/update/tensor_passes.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/util/ScopeExit.h>

#include "optim/worker_pool.h"
#include "zero/update/factor_sums.h"
#include "zeropage/check.h"
#include "zeropage/event_sink.h"
#include "zeropage/ledger.h"

namespace zeropage::zero {

using Sums = TensorSums::Sums;

TensorPasses::TensorPasses(ShardedModel parameters, const ParameterGroups& groups,
                           const PageUpdates& updates, const UpdateAlgorithm& algorithm)
    : parameters_(std::move(parameters)),
      groups_(groups),
      updates_(updates),
      algorithm_(algorithm),
      embeddings_(algorithm.embeddings),
      sums_(*parameters_.pages) {
  ZP_CHECK(parameters_.options.offload.step == StepWhen::kInStep,
           "options.offload.step: ", algorithm_.class_name,
           " reads whole tensors, of which ranks know only when backward has ended; use "
           "StepWhen::kInStep");
  find_embeddings();
  adopt();
}

// A head is on another stage than the embedding whose sizes it has.
void TensorPasses::find_embeddings() {
  const comm::World* const stages = pipeline_world_of(*parameters_.pages);
  if (stages == nullptr) return;
  const std::string own = embeddings_.sizes();
  for (const std::string& of_stage : stages->gather_text("the sizes of embeddings", own)) {
    embeddings_.add_sizes(of_stage);
  }
}

void TensorPasses::adopt() {
  check_known();
  if (known_groups_.size() == groups_.size() && known_pages_.size() == updates_.all().size())
    return;
  for (size_t group = known_groups_.size(); group < groups_.size(); ++group) check_new(group);
  find_parameters();
  find_pages();
  find_buckets();
}

// A script may have changed options since the last step.
void TensorPasses::check_known() {
  for (size_t group = 0; group < known_groups_.size(); ++group) {
    const torch::optim::OptimizerOptions& options = groups_.options(group);
    KnownGroup& known = known_groups_[group];
    const uint64_t hash = known.hash.of(options, algorithm_.options);
    if (hash == known.checked) continue;
    // The states of a parameter are what its group's rule needs.
    ZP_CHECK(form().reads(options) == known.reads, algorithm_.class_name, ": parameter group ",
             group,
             " has another rule than when the optimizer was made; leave it, or make the optimizer "
             "anew");
    for (const size_t index : groups_.parameters_of(group)) check(group, index);
    known.checked = hash;
  }
}

void TensorPasses::check_new(size_t group) {
  const torch::optim::OptimizerOptions& options = groups_.options(group);
  for (const size_t index : groups_.parameters_of(group)) check(group, index);
  KnownGroup known{.reads = form().reads(options)};
  known.checked = known.hash.of(options, algorithm_.options);
  known_groups_.push_back(std::move(known));
}

void TensorPasses::check(size_t group, size_t parameter) const {
  const torch::optim::OptimizerOptions& options = groups_.options(group);
  if (form().reads(options) == UpdateReads::kElement) return;
  const NamedParameter& named = parameters_.pages->parameters()[parameter].parameter;
  ZP_CHECK(
      !named.slice, algorithm_.class_name, ": parameter \"", named.name(),
      "\" is cut over ranks, by tensor parallelism or as experts, and the update is of the "
      "whole; leave its layer whole, or give it to a group that is updated element by element");
  ZP_CHECK(form().takes_embeddings(options) || !embeddings_.contain(named.tensor),
           algorithm_.class_name, ": parameter \"", named.name(), "\" of sizes ",
           named.tensor.sizes(),
           " is an embedding, or a head of an embedding's sizes; give it to a group with "
           "MuonOptions::adamw(lr), as zeropage::muon_groups(module, MuonOptions(lr)) does, or say "
           "takes_embeddings(true) in its MuonOptions");
  ZP_CHECK(!form().has_whole_states(named.tensor.sizes()) || named.tensor.is_contiguous(),
           algorithm_.class_name, ": parameter \"", named.name(), "\" of sizes ",
           named.tensor.sizes(), " and strides ", named.tensor.strides(),
           ": expected a contiguous one, whose rows and columns lie as its sizes say; make it of "
           "tensor.contiguous()");
  const std::string objection = form().objection_to(options, named.tensor.sizes());
  ZP_CHECK(objection.empty(), algorithm_.class_name, ": parameter \"", named.name(), "\" of sizes ",
           named.tensor.sizes(), objection);
}

at::IntArrayRef TensorPasses::sizes_of(size_t parameter) const {
  return parameters_.pages->parameters()[parameter].parameter.tensor.sizes();
}

void TensorPasses::find_parameters() {
  group_of_.assign(parameters_.pages->parameters().size(), -1);
  for (size_t page = 0; page < parameters_.pages->layouts().size(); ++page) {
    for (const ParameterGroups::Member& member : groups_.of_page(page)) {
      group_of_[member.parameter] = static_cast<int64_t>(member.group);
    }
  }
}

void TensorPasses::find_buckets() {
  std::vector<PageOfMatrices> pages;
  for (const OfPage& of_page : updates_.all()) {
    PageOfMatrices& page = pages.emplace_back();
    for (const size_t index : parameters_.pages->parameters().of_page(of_page.page)) {
      const int64_t numel = parameters_.pages->parameters()[index].range.numel();
      if (numel == 0 || group_of_[index] < 0 || reads(index) == UpdateReads::kElement) continue;
      page.numel += numel;
      if (reads(index) != UpdateReads::kMatrix) continue;
      page.matrices.push_back(
          {.parameter = index, .cost = form().cost(options_of(index), sizes_of(index))});
    }
  }
  // Where each rank has all of a page, it has all of a bucket: more ranks would take more memory, and not less each.
  constexpr int kRanksOfWholePages = 8;
  const int ranks = parameters_.pages->shards().size();
  const bool are_whole = parameters_.pages->plan().ownership() == Ownership::kWholePage;
  const int64_t bucket =
      are_whole ? kBucketNumel * std::min(ranks, kRanksOfWholePages) / ranks : kBucketNumel;
  buckets_ = matrix_buckets(pages, ranks, bucket);
}

int64_t TensorPasses::bytes_of_directions(const MatrixBucket& bucket) const {
  const c10::Device compute = parameters_.pages->world().communicator().device();
  int64_t numel = 0;
  for (size_t at = bucket.first_page; at < bucket.end_page; ++at) {
    const KnownPage& known = known_pages_[at];
    if (!known.has_directions || known.device != compute) continue;
    numel += parameters_.pages->owned(updates_.all()[at].page).numel();
  }
  return numel * static_cast<int64_t>(sizeof(float));
}

MatrixBytes TensorPasses::bytes_of_matrices(const MatrixBucket& bucket) const {
  const c10::Device device = parameters_.pages->world().communicator().device();
  return matrix_bytes(*parameters_.pages, bucket.matrices, [&](size_t parameter) {
    const size_t page = place_of(parameters_.pages->parameters()[parameter].page);
    return MatrixPlace{.wire_dtype = form().wire_dtype(options_of(parameter), device),
                       .is_on_device = known_pages_[page].device == device};
  });
}

// When a bucket's own matrices are transformed and depart.
int64_t TensorPasses::transient_bytes() const {
  int64_t most = 0;
  for (size_t now = 0; now < buckets_.size(); ++now) {
    const MatrixBytes of_now = bytes_of_matrices(buckets_[now]);
    int64_t bytes = bytes_of_directions(buckets_[now]) + of_now.whole + of_now.from_owners;
    if (now > 0) {
      bytes +=
          bytes_of_directions(buckets_[now - 1]) + bytes_of_matrices(buckets_[now - 1]).from_owners;
    }
    if (now + 1 < buckets_.size()) {
      bytes +=
          bytes_of_directions(buckets_[now + 1]) + bytes_of_matrices(buckets_[now + 1]).to_owners;
    }
    most = std::max(most, bytes);
  }
  return most;
}

void TensorPasses::find_pages() {
  const c10::Device compute = parameters_.pages->world().communicator().device();
  known_pages_.clear();
  for (const OfPage& of_page : updates_.all()) {
    // What a simulation has on its host is on the meta device, too.
    const bool is_on_host = of_page.part && !compute.is_meta();
    const c10::Device device = is_on_host ? c10::Device(c10::kCPU) : compute;
    const auto& parameters = parameters_.pages->parameters().of_page(of_page.page);
    const bool has_directions =
        std::any_of(parameters.begin(), parameters.end(), [this](size_t index) {
          return group_of_[index] >= 0 && reads(index) != UpdateReads::kElement;
        });
    known_pages_.push_back({.has_directions = has_directions,
                            .device = device,
                            .sums = sums_.of_page(of_page.page, with_sums(of_page.page), device)});
  }
}

void TensorPasses::run(const HasGradient& has_gradient, const optim::GradientFactors& factors,
                       const SecondPass& second_pass) {
  std::unique_ptr<BucketUnderWay> next;
  std::unique_ptr<BucketUnderWay> last;
  for (size_t at = 0; at < buckets_.size(); ++at) {
    std::unique_ptr<BucketUnderWay> now =
        next ? std::move(next) : begin(buckets_[at], has_gradient, factors);
    if (at + 1 < buckets_.size()) next = begin(buckets_[at + 1], has_gradient, factors);
    if (now->exchange) {
      const memory::OwnerScope owner("optimizer", "whole matrices");
      now->exchange->transform();
    }
    if (last) finish(*last, second_pass);
    last = std::move(now);
  }
  if (last) finish(*last, second_pass);
}

std::unique_ptr<TensorPasses::BucketUnderWay> TensorPasses::begin(
    const MatrixBucket& bucket, const HasGradient& has_gradient,
    const optim::GradientFactors& factors) {
  auto under_way = std::make_unique<BucketUnderWay>();
  under_way->bucket = &bucket;
  const std::vector<at::Tensor> gradients = sum_factors(bucket, has_gradient, factors);
  for (size_t at = bucket.first_page; at < bucket.end_page; ++at) {
    for (const size_t index : parameters_.pages->parameters().of_page(updates_.all()[at].page)) {
      sums_.begin(index);
    }
    const at::Tensor& known = gradients[at - bucket.first_page];
    under_way->directions.push_back(first_pass(at, known, has_gradient, factors));
  }
  under_way->exchange = exchange_of(*under_way, has_gradient);
  if (under_way->exchange) {
    const memory::OwnerScope owner("optimizer", "whole matrices");
    under_way->exchange->begin();
  }
  under_way->sums = start_sums(bucket, has_gradient);
  return under_way;
}

void TensorPasses::finish(BucketUnderWay& under_way, const SecondPass& second_pass) {
  if (under_way.exchange) under_way.exchange->finish();
  under_way.exchange.reset();
  sums_.take(under_way.sums);
  std::vector<Directions> directions;
  for (at::Tensor& of_page : under_way.directions) {
    const auto factor = [this](size_t parameter) {
      return form().factor(options_of(parameter), sizes_of(parameter), sums_.of(parameter));
    };
    directions.push_back({.values = std::move(of_page), .factor = factor});
  }
  second_pass(*under_way.bucket, directions);
}

// This rank's part of the page's, where the page is updated.
at::Tensor TensorPasses::gradient_of(size_t page) const {
  const OfPage& of_page = updates_.all()[page];
  at::Tensor gradient = parameters_.gradients->owned(of_page.page);
  if (!of_page.part) return gradient;
  if (parameters_.gradients->is_offloaded(of_page.page)) {
    parameters_.gradients->arrival(of_page.page).synchronize();
  } else if (gradient.defined() && !gradient.is_meta()) {
    gradient = gradient.cpu();
  }
  return gradient;
}

// Sums over rows and columns. Returns the gradients of the bucket's pages, as far as they were needed.
std::vector<at::Tensor> TensorPasses::sum_factors(const MatrixBucket& bucket,
                                                  const HasGradient& has_gradient,
                                                  const optim::GradientFactors& factors) const {
  std::vector<at::Tensor> gradients(bucket.end_page - bucket.first_page);
  std::vector<FactorSums::Parameter> with_factors;
  for (size_t at = bucket.first_page; at < bucket.end_page; ++at) {
    for (const size_t index : parameters_.pages->parameters().of_page(updates_.all()[at].page)) {
      if (group_of_[index] < 0 || parameters_.pages->parameters()[index].range.empty()) continue;
      if (!has_gradient(index) || !form().has_whole_states(sizes_of(index))) continue;
      with_factors.push_back({.parameter = index, .page = at});
    }
  }
  if (with_factors.empty()) return gradients;
  const memory::OwnerScope owner("optimizer", "sums over rows and columns");
  std::optional<optim::WorkerPoolScope> pool;
  if (const auto& away = parameters_.pages->page_offload()) pool.emplace(away->pool());
  const auto known = [&](size_t page) {
    at::Tensor& gradient = gradients[page - bucket.first_page];
    if (!gradient.defined()) gradient = gradient_of(page);
    return gradient;
  };
  FactorSums(parameters_, updates_, known, factors.scale).run(with_factors);
  return gradients;
}

// known_gradient: the page's, or undefined.
at::Tensor TensorPasses::first_pass(size_t page, const at::Tensor& known_gradient,
                                    const HasGradient& has_gradient,
                                    const optim::GradientFactors& factors) {
  const KnownPage& known = known_pages_[page];
  if (!known.has_directions) return {};
  const OfPage& of_page = updates_.all()[page];
  const memory::OwnerScope owner("optimizer", parameters_.pages->layouts()[of_page.page].name);
  at::Tensor directions = at::empty({parameters_.pages->owned(of_page.page).numel()},
                                    at::TensorOptions(known.device).dtype(at::kFloat));
  updates_.set_options(of_page);
  const at::Tensor gradient = known_gradient.defined() ? known_gradient : gradient_of(page);
  if (!of_page.part) {
    make_directions(page, gradient, has_gradient, factors, directions);
    return directions;
  }
  PageOffload& away = *parameters_.pages->page_offload();
  const optim::WorkerPoolScope pool(away.pool());
  away.fetch_for_update(of_page.page);
  const auto release = c10::make_scope_exit([&] { away.release_after_update(of_page.page); });
  make_directions(page, gradient, has_gradient, factors, directions);
  return directions;
}

void TensorPasses::make_directions(size_t page, const at::Tensor& gradient,
                                   const HasGradient& has_gradient,
                                   const optim::GradientFactors& factors,
                                   const at::Tensor& directions) {
  const TensorSums::OfPage& sums = known_pages_[page].sums;
  updates_.all()[page].update->make_directions(gradient, has_gradient, factors, directions, [&] {
    sums_.add_squares(sums, directions, &Sums::values);
  });
  sums_.add_squares(sums, directions, &Sums::directions);
}

// under_way: as long as the exchange.
std::unique_ptr<MatrixExchange> TensorPasses::exchange_of(const BucketUnderWay& under_way,
                                                          const HasGradient& has_gradient) const {
  const c10::Device device = parameters_.pages->world().communicator().device();
  std::vector<MatrixExchange::Matrix> matrices;
  for (const OwnedMatrix& owned : under_way.bucket->matrices) {
    if (!has_gradient(owned.parameter)) continue;
    const torch::optim::OptimizerOptions& options = options_of(owned.parameter);
    matrices.push_back({.parameter = owned.parameter,
                        .owner = owned.owner,
                        .wire_dtype = form().wire_dtype(options, device),
                        .transform = [this, &options](const at::Tensor& matrix) {
                          form().transform(options, matrix);
                        }});
  }
  if (matrices.empty()) return nullptr;
  return std::make_unique<MatrixExchange>(
      *parameters_.pages, std::move(matrices), [this, &under_way](size_t page) {
        return under_way.directions[place_of(page) - under_way.bucket->first_page];
      });
}

std::vector<size_t> TensorPasses::with_sums(size_t page) const {
  std::vector<size_t> with_sums;
  for (const size_t index : parameters_.pages->parameters().of_page(page)) {
    if (group_of_[index] >= 0 && reads(index) == UpdateReads::kSums) with_sums.push_back(index);
  }
  return with_sums;
}

TensorSums::UnderWay TensorPasses::start_sums(const MatrixBucket& bucket,
                                              const HasGradient& has_gradient) const {
  std::vector<size_t> summed;
  for (size_t at = bucket.first_page; at < bucket.end_page; ++at) {
    for (const size_t index : with_sums(updates_.all()[at].page)) {
      const bool is_empty = parameters_.pages->parameters()[index].range.empty();
      if (has_gradient(index) && !is_empty) summed.push_back(index);
    }
  }
  return sums_.start(std::move(summed));
}

}  // namespace zeropage::zero
