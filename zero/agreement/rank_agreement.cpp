#include "zero/agreement/rank_agreement.h"

#include <algorithm>
#include <map>
#include <utility>

#include <ATen/ops/empty.h>

#include "zeropage/check.h"

namespace zeropage::zero {
namespace {

using AlongAxis = RankAgreement::Axis;
using ToldKind = RankAgreement::Kind;
using ToldLine = RankAgreement::Line;

constexpr std::array kAxes = {AlongAxis::kData, AlongAxis::kExperts, AlongAxis::kTensor,
                              AlongAxis::kPipeline};
constexpr char kBeforeHas = '\x1f';
// Further ones are counted.
constexpr size_t kMostDifferences = 3;

size_t at(AlongAxis axis) {
  return static_cast<size_t>(axis);
}

const char* advice(ToldKind kind) {
  switch (kind) {
    case ToldKind::kSteps:
      return "a rank left out step(), or called it alone, and its parameters are others now: call "
             "it on all ranks or "
             "on none, say where world.max() of what each wants is 0, and restart from the last "
             "saved state";
    case ToldKind::kSettings:
      return "set options on all ranks alike, from numbers that all have: give schedulers "
             "world.mean(loss)";
    case ToldKind::kValues:
      return "write the same values on all ranks, with random numbers of one seed, or write under "
             "GatheredParameters(model, Modified::on_rank(0)), which gives all ranks rank 0's. "
             "Where no script "
             "wrote, machines of other kinds round updates in other ways: use stage 1";
  }
  return "";
}

// Along "tensor", where ranks drift by other mistakes.
constexpr const char* kAdviceOfSlices =
    "The ranks of a tensor-parallel group trained on with other values: name parameters between a "
    "column and its row in the plan, as Cut::between(); give these ranks the same batches and "
    "seeds; write the same values on all of them; where layers of zeropage/parallel_layers.h are "
    "clipped, "
    "do so by zeropage::clip_grad_norm_, as torch::nn::utils' takes the norm of slices";

std::string to_text(const RankAgreement::Lines& lines) {
  std::string text;
  for (const ToldLine& line : lines) {
    text += static_cast<char>('0' + static_cast<int>(line.kind));
    text += line.what + kBeforeHas + line.has + '\n';
  }
  return text;
}

// By kind and what.
std::map<std::string, std::string> from_text(const std::string& text) {
  std::map<std::string, std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t has = text.find(kBeforeHas, begin);
    const size_t end = text.find('\n', has);
    lines[text.substr(begin, has - begin)] = text.substr(has + 1, end - has - 1);
    begin = end + 1;
  }
  return lines;
}

// What one rank has otherwise than a rank before it.
class Differences {
 public:
  explicit Differences(const std::function<int(int)>& name_of) : name_of_(name_of) {}

  void note(const std::string& key, size_t here, const std::string& has_here, size_t there,
            const std::string& has_there) {
    if (has_here == has_there) return;
    if (words_.empty()) kind_ = static_cast<ToldKind>(key.front() - '0');
    if (key.front() - '0' == static_cast<int>(kind_) && count_ < kMostDifferences) {
      words_ += c10::str(words_.empty() ? "" : "; ", key.substr(1), ": rank ",
                         name_of_(static_cast<int>(here)), " has ", has_here, ", rank ",
                         name_of_(static_cast<int>(there)), " has ", has_there);
    }
    ++count_;
  }
  bool empty() const { return count_ == 0; }
  ToldKind kind() const { return kind_; }
  std::string words() const {
    return count_ <= kMostDifferences
               ? words_
               : c10::str(words_, "; and ", count_ - kMostDifferences, " more differences");
  }

 private:
  const std::function<int(int)>& name_of_;
  std::string words_;
  ToldKind kind_ = ToldKind::kSteps;
  size_t count_ = 0;
};

bool is_of_values(const std::string& key) {
  return key.front() - '0' == static_cast<int>(ToldKind::kValues);
}

// "" where they are alike. Values that a rank does not have are those of other slices or stages; those of two ranks are
// compared whichever these are.
std::string difference(const std::vector<std::string>& texts, const std::string& who,
                       bool have_slices, const std::function<int(int)>& name_of) {
  struct Told {
    size_t rank;
    std::string has;
  };
  const auto first = from_text(texts.front());
  std::map<std::string, Told> known;
  for (const auto& [key, has] : first) known.emplace(key, Told{0, has});
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    const auto own = from_text(texts[rank]);
    Differences differences(name_of);
    for (const auto& [key, has] : first) {
      if (!is_of_values(key) && !own.contains(key)) differences.note(key, 0, has, rank, "none");
    }
    for (const auto& [key, has] : own) {
      if (!is_of_values(key) && !first.contains(key)) {
        differences.note(key, 0, "none", rank, has);
        continue;
      }
      const auto [place, is_new] = known.try_emplace(key, Told{rank, has});
      if (!is_new) differences.note(key, place->second.rank, place->second.has, rank, has);
    }
    if (differences.empty()) continue;
    return c10::str(who, ": ranks must have this alike. ", differences.words(), ". ",
                    have_slices && differences.kind() == ToldKind::kValues
                        ? kAdviceOfSlices
                        : advice(differences.kind()));
  }
  return "";
}

constexpr const char* kAlikeAlongSlices = "what the ranks of a tensor-parallel group have alike";

AgreementResult exchanged(const comm::World& ranks, const AgreementHashes& own_hashes,
                          const char* what) {
  const at::Tensor bytes = at::empty({static_cast<int64_t>(kToldBytes)}, at::kByte);
  put(own_hashes, bytes.mutable_data_ptr<uint8_t>());
  ranks.communicator().all_reduce(bytes, comm::ReduceOp::kMax, what).wait();
  return agreement_result(bytes.const_data_ptr<uint8_t>());
}

}  // namespace

RankAgreement::RankAgreement(std::shared_ptr<const ParameterPages> pages,
                             std::shared_ptr<PageWrites> writes)
    : pages_(std::move(pages)),
      writes_(std::move(writes)),
      is_alone_(std::none_of(kAxes.begin(), kAxes.end(),
                             [this](Axis axis) { return along(axis) != nullptr; })) {}

std::shared_ptr<void> RankAgreement::add(Part part) {
  const auto where = parts_.insert(parts_.end(), std::move(part));
  return {nullptr, [this, where](void*) { parts_.erase(where); }};
}

// In a simulated world nobody else says anything.
const comm::World* RankAgreement::along(Axis axis) const {
  if (pages_->world().device().is_meta()) return nullptr;
  if (axis == Axis::kData) return pages_->world().size() > 1 ? &pages_->world() : nullptr;
  if (axis == Axis::kExperts) {
    const auto& same = pages_->worlds().same_experts;
    return same && same->size() > 1 ? &*same : nullptr;
  }
  return axis == Axis::kTensor ? pages_->tensor_world() : pipeline_world_of(*pages_);
}

void RankAgreement::begin_backward(bool reduces) {
  if (is_alone_) return;
  writes_->write_back();
  settle_what_differs("backward()");
  if (reduces) values_ = writes_->user_writes().look(backwards_++);
}

AgreementHashes RankAgreement::own_hashes(Axis axis) const {
  if (is_alone_) return {};
  Fingerprint steps, settings;
  for (const Part& part : parts_) {
    const AgreementHashes of_part = part.own_hashes();
    steps.add(of_part.steps);
    settings.add(of_part.settings);
  }
  AgreementHashes own_hashes{.steps = steps.value(), .settings = settings.value()};
  if (axis == Axis::kData) own_hashes.values = values_.all;
  if (axis == Axis::kExperts) own_hashes.values = values_.of_experts;
  if (axis == Axis::kTensor) own_hashes.values = values_.whole;
  return own_hashes;
}

AgreementHashes RankAgreement::hashes_now() {
  if (!is_alone_) values_ = writes_->user_writes().look(backwards_);
  return own_hashes();
}

void RankAgreement::take_result(Axis axis, const AgreementHashes& own_hashes,
                                const AgreementResult& agreed_on, const std::string& who) {
  const comm::World* const ranks = along(axis);
  if (ranks == nullptr) return;
  agreed_settings_ = own_hashes.settings;
  results_[at(axis)].settings = agreed_on.settings;
  if (!agreed_on.steps) settle(*ranks, who);
}

void RankAgreement::take_backward_result(const AgreementHashes& own_hashes,
                                         const AgreementResult& agreed_on) {
  const comm::World* const slices = pages_->tensor_world();
  if (pages_->world().device().is_meta() && slices != nullptr) {
    // What is sent is counted there too.
    exchanged(*slices, own_hashes, kAlikeAlongSlices);
    return;
  }
  if (is_alone_) return;
  results_[at(Axis::kData)].values = agreed_on.values;
  take_result(Axis::kData, own_hashes, agreed_on, "backward()");
  for (const auto& [axis, what] :
       {std::pair{Axis::kExperts, "what ranks with the same experts have alike"},
        std::pair{Axis::kTensor, kAlikeAlongSlices}}) {
    if (along(axis) == nullptr) continue;
    const AgreementResult of_group = tell(axis, this->own_hashes(axis), what);
    results_[at(axis)].values = of_group.values;
    take_result(axis, own_hashes, of_group, "backward()");
  }
  const bool alike = std::all_of(results_.begin(), results_.end(),
                                 [](const AgreementResult& of_axis) { return of_axis.values; });
  if (alike) writes_->user_writes().forget();
}

AgreementResult RankAgreement::tell(Axis axis, const AgreementHashes& own_hashes,
                                    const char* what) const {
  const comm::World* const ranks = along(axis);
  return ranks == nullptr ? AgreementResult() : exchanged(*ranks, own_hashes, what);
}

void RankAgreement::settle_what_differs(const std::string& who) {
  for (const Axis axis : kAxes) {
    if (results_[at(axis)].all()) continue;
    settle(*along(axis), who);
    results_[at(axis)] = {};
    agreed_settings_ = settings();
  }
}

void RankAgreement::begin_step(const std::string& who) {
  if (is_alone_) return;
  writes_->write_back();
  settle_what_differs(who);
  UserWrites& writes = writes_->user_writes();
  // What was written into a step that a backward has made is refused by the update.
  const bool were_written = !writes_->is_any_in_update() && writes.has_news();
  if (settings() == agreed_settings_ && !were_written) return;
  values_ = writes.look(/*sample_round=*/std::nullopt);
  for (const Axis axis : kAxes) {
    const AgreementResult agreed_on =
        tell(axis, own_hashes(axis),
             "what changed between backward() and step(): options, or parameters");
    if (!agreed_on.all()) settle(*along(axis), who);
  }
  agreed_settings_ = settings();
  writes.forget();
}

void RankAgreement::settle(const comm::World& ranks, const std::string& who) {
  Lines lines;
  size_t index = 0;
  for (const Part& part : parts_) part.describe(index++, lines);
  UserWrites& writes = writes_->user_writes();
  writes.look(/*sample_round=*/std::nullopt);
  writes.describe([&](const std::string& what, const std::string& has) {
    lines.push_back({Kind::kValues, what, has});
  });
  const std::string differs =
      ranks.settle(who, to_text(lines), [&](const std::vector<std::string>& texts) {
        return difference(texts, who, &ranks == pages_->tensor_world(),
                          [&ranks](int rank) { return ranks.global_rank(rank); });
      });
  ZP_CHECK(differs.empty(), differs);
  writes.forget();
}

}  // namespace zeropage::zero
