#include "zeropage/recompute.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <iomanip>
#include <map>
#include <sstream>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include "checkpointing/detail/forward_tape.h"
#include "operators/operator_interceptor.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"
#include "zeropage/ledger.h"
#include "zeropage/saved_tensors.h"

namespace zeropage::checkpointing {
namespace {

using detail::ForwardPlan;
using detail::ForwardTape;

// What the forecast may be off by.
constexpr double kPlannedShare = 0.985;

// Rows of less would be lost in rounding.
constexpr int64_t kLeastOfATable = 64 * 1024;

// One line an operator whose saved tensors are dropped at all.
std::string table_of(const RecordedStep& step, const RecomputePlan& plan,
                     const std::vector<std::string>& names) {
  struct Row {
    int64_t saved = 0, dropped = 0, dropped_bytes = 0, saved_bytes = 0;
    double seconds = 0;
  };
  std::map<std::string, Row> rows;
  for (size_t index = 0; index < step.values.size(); ++index) {
    const RecordedValue& value = step.values[index];
    if (value.retention == Retention::kPassing || value.producer == kLeaf) continue;
    Row& row = rows[names[value.producer]];
    ++row.saved;
    row.saved_bytes += value.bytes;
    if (!plan.dropped[index]) continue;
    ++row.dropped;
    row.dropped_bytes += value.bytes;
  }
  for (size_t index = 0; index < names.size(); ++index) {
    const auto row = rows.find(names[index]);
    if (row == rows.end()) continue;
    row->second.seconds +=
        static_cast<double>(plan.forecast.replays[index]) * step.operators[index].seconds;
  }
  std::ostringstream out;
  out << std::left << std::setw(44) << "saved by" << std::right << std::setw(12) << "dropped"
      << std::setw(12) << "bytes" << std::setw(10) << "again\n";
  for (const auto& [name, row] : rows) {
    if (row.saved_bytes < kLeastOfATable) continue;
    out << std::left << std::setw(44) << name << std::right << std::setw(12)
        << c10::str(row.dropped, "/", row.saved) << std::setw(12)
        << memory::format_bytes(row.dropped_bytes) << std::setw(7) << std::fixed
        << std::setprecision(1) << row.seconds * 1e3 << " ms\n";
  }
  return out.str();
}

// Rank 0's number, if there is a function that gives it.
int64_t agreed(int64_t number, const RecomputeOptions& options) {
  if (!options.agree) return number;
  at::Tensor bytes = at::empty({sizeof(number)}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &number, sizeof(number));
  options.agree(bytes);
  std::memcpy(&number, bytes.const_data_ptr(), sizeof(number));
  return number;
}

// Where the enclosing scope has kept storages taken; null: nowhere.
std::shared_ptr<SavedTensorHooks> place_around() {
  const auto around = SavedTensorScope::current();
  return around ? around->place_of_storages() : nullptr;
}

// Activations that are no business of the next forward.
int64_t held_before(const RecomputeOptions& options) {
  return agreed(memory::Ledger::current()->now(options.device).activations(), options);
}

// This rank's plan, or rank 0's if somebody tells it. Measurements differ a little, so a budget that only
// just holds may be out of reach by this rank's: what rank 0 finds decides for all.
RecomputePlan agreed_plan(const RecordedStep& step, int64_t budget_bytes,
                          const RecomputeOptions& options) {
  if (!options.agree) return plan_recompute(step, budget_bytes);
  constexpr int64_t kRefused = -1;
  const auto count = static_cast<int64_t>(step.values.size());
  RecomputePlan plan;
  std::exception_ptr refused;
  try {
    plan = plan_recompute(step, budget_bytes);
  } catch (const c10::Error&) {
    refused = std::current_exception();
    plan.dropped.assign(step.values.size(), false);
  }
  const int64_t of_rank_zero = agreed(refused ? kRefused : count, options);
  if (of_rank_zero == kRefused && refused) std::rethrow_exception(refused);
  ZP_CHECK(of_rank_zero != kRefused, "recompute: rank 0 found no plan within the budget of ",
           memory::format_bytes(*options.budget_bytes),
           "; its error has the least that one needs; raise the budget");
  ZP_CHECK(count == of_rank_zero,
           "recompute: expected that the ranks run the same forward, but rank 0's makes ",
           of_rank_zero, " values and this rank's ", count,
           "; give ranks batches of the same shapes, or recompute selectively");
  at::Tensor decision = at::empty({count}, at::kByte);
  auto* bits = decision.mutable_data_ptr<uint8_t>();
  std::copy(plan.dropped.begin(), plan.dropped.end(), bits);
  options.agree(decision);
  std::transform(bits, bits + count, plan.dropped.begin(), [](uint8_t bit) { return bit != 0; });
  return plan;
}

}  // namespace

RecomputeOptions RecomputeOptions::by_blocks(ModuleBlocks blocks) {
  RecomputeOptions options;
  options.blocks = std::move(blocks);
  return options;
}

RecomputeOptions RecomputeOptions::nothing() {
  RecomputeOptions options;
  options.keeps_all = true;
  return options;
}

Recompute::Recompute(RecomputeOptions options)
    : options_(std::move(options)), account_(std::make_shared<detail::RecomputeAccount>()) {
  ZP_CHECK(!options_.budget_bytes || *options_.budget_bytes > 0,
           "Recompute: expected a budget of 1 byte or more, got ", *options_.budget_bytes,
           "; leave it out to recompute selectively");
  ZP_CHECK(
      !options_.budget_bytes || options_.blocks.parameters.empty(),
      "Recompute: expected a budget or blocks, got both; blocks are computed again whatever is "
      "left, and a budget chooses among all operators");
  ZP_CHECK(options_.least_bytes >= 0, "Recompute: expected least_bytes of 0 or more, got ",
           options_.least_bytes, "; 0 lets every saved tensor be dropped");
}

Recompute::~Recompute() = default;
Recompute::Recompute(Recompute&&) noexcept = default;
Recompute& Recompute::operator=(Recompute&&) noexcept = default;

std::unique_ptr<ActivationPolicy::Forward> Recompute::begin_forward() {
  class UnderTape final : public Forward {
   public:
    explicit UnderTape(std::shared_ptr<ForwardTape> tape)
        : tape_(std::move(tape)),
          hooks_(tape_->hooks(/*onward=*/place_around())),
          interceptor_(tape_.get()),
          kind_(memory::Kind::kActivation) {}
    ~UnderTape() override { tape_->end_forward(); }

   private:
    const std::shared_ptr<ForwardTape> tape_;
    const SavedTensorScope hooks_;
    const operators::InterceptorScope interceptor_;
    const memory::KindScope kind_;
  };
  check_not_moved_from(account_ != nullptr, "Recompute");
  if (options_.keeps_all || !at::GradMode::is_enabled() || c10::InferenceMode::is_enabled()) {
    return nullptr;
  }
  if (last_ && last_->meter() != nullptr) plan_from(*last_->meter());
  // A forward that did otherwise is the one to plan for.
  if (last_ && last_->departed()) plan_.reset();
  const bool measures = options_.budget_bytes && !plan_;
  last_ = std::make_shared<ForwardTape>(detail::TapeOptions{
      .policy = choose_policy(),
      .measured_device = measures ? std::optional(options_.device) : std::nullopt,
      .decides_alone = options_.budget_bytes && !options_.agree,
      .account = account_});
  return std::make_unique<UnderTape>(last_);
}

std::unique_ptr<detail::DropPolicy> Recompute::choose_policy() const {
  if (!options_.blocks.parameters.empty()) {
    return std::make_unique<detail::BlockDrops>(options_.least_bytes, options_.blocks.parameters);
  }
  if (!options_.budget_bytes) return std::make_unique<detail::SelectiveDrops>(options_.least_bytes);
  const int64_t limit_bytes = std::max<int64_t>(1, *options_.budget_bytes - held_before(options_));
  if (plan_) {
    return std::make_unique<detail::PlannedDrops>(plan_, options_.least_bytes, limit_bytes);
  }
  return std::make_unique<detail::CheapestDrops>(options_.least_bytes, limit_bytes);
}

void Recompute::plan_from(const detail::StepMeter& measured) {
  const auto budget =
      static_cast<int64_t>(kPlannedShare * static_cast<double>(*options_.budget_bytes));
  auto plan = std::make_shared<ForwardPlan>();
  plan->plan = agreed_plan(measured.step(), budget, options_);
  plan->plan.forecast = simulate(measured.step(), plan->plan.dropped);
  plan->signatures = measured.signatures();
  plan_table_ = table_of(measured.step(), plan->plan, measured.names());
  plan_ = std::move(plan);
}

std::optional<int64_t> Recompute::forecast_peak_bytes() const {
  if (!plan_) return std::nullopt;
  return plan_->plan.forecast.peak_bytes;
}

std::optional<double> Recompute::forecast_replay_seconds() const {
  if (!plan_) return std::nullopt;
  return plan_->plan.forecast.replay_seconds;
}

std::string Recompute::plan_table() const {
  return plan_ ? plan_table_ : "";
}

RecomputeStatistics Recompute::statistics() const {
  return account_->statistics();
}

bool Recompute::runs_forward() {
  return dynamic_cast<const ForwardTape*>(operators::OperatorInterceptor::current()) != nullptr;
}

bool Recompute::decides_alone() {
  const auto* tape = dynamic_cast<const ForwardTape*>(operators::OperatorInterceptor::current());
  return tape != nullptr && tape->decides_alone();
}

}  // namespace zeropage::checkpointing
