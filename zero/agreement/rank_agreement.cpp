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

constexpr std::array kAxes = {AlongAxis::kData,     AlongAxis::kExperts,  AlongAxis::kTensor,
                              AlongAxis::kPipeline, AlongAxis::kReplicas, AlongAxis::kTied};
// Along these axes ranks tell each other what they changed between backward and step().
constexpr std::array kAxesOfChanges = {AlongAxis::kData, AlongAxis::kExperts, AlongAxis::kTensor,
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
             "Where no script wrote, machines of other kinds round updates in other ways at stage "
             "0: use stage 1; on machines of one kind the memory of a rank erred: restart from the "
             "last saved state without the host of the rank that differs from the others";
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

bool is_of_values(const std::string& key) {
  return key.front() - '0' == static_cast<int>(ToldKind::kValues);
}

// What a rank told, by key.
using ToldByKey = std::map<std::string, std::string>;

// Where most ranks have the same values, the others are at fault: "; 3 of 4 ranks have what rank 1 has".
std::string words_of_most(const std::vector<ToldByKey>& by_rank, const std::string& key,
                          const std::function<int(int)>& name_of) {
  constexpr size_t kLeastThatTell = 3;
  std::map<std::string, std::vector<size_t>> ranks_with;
  size_t count = 0;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const auto told = by_rank[rank].find(key);
    if (told == by_rank[rank].end()) continue;
    ranks_with[told->second].push_back(rank);
    ++count;
  }
  if (count < kLeastThatTell) return "";
  for (const auto& [has, ranks] : ranks_with) {
    if (2 * ranks.size() <= count) continue;
    return c10::str(", and ", ranks.size(), " of ", count, " ranks have what rank ",
                    name_of(static_cast<int>(ranks.front())), " has");
  }
  return "";
}

// What one rank has otherwise than a rank before it.
class Differences {
 public:
  Differences(const std::vector<ToldByKey>& by_rank, const std::function<int(int)>& name_of)
      : by_rank_(by_rank), name_of_(name_of) {}

  void note(const std::string& key, size_t here, const std::string& has_here, size_t there,
            const std::string& has_there) {
    if (has_here == has_there) return;
    if (words_.empty()) kind_ = static_cast<ToldKind>(key.front() - '0');
    if (key.front() - '0' == static_cast<int>(kind_) && count_ < kMostDifferences) {
      words_ += c10::str(words_.empty() ? "" : "; ", key.substr(1), ": rank ",
                         name_of_(static_cast<int>(here)), " has ", has_here, ", rank ",
                         name_of_(static_cast<int>(there)), " has ", has_there);
      if (is_of_values(key)) words_ += words_of_most(by_rank_, key, name_of_);
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
  const std::vector<ToldByKey>& by_rank_;
  const std::function<int(int)>& name_of_;
  std::string words_;
  ToldKind kind_ = ToldKind::kSteps;
  size_t count_ = 0;
};

// "" where they are alike. what: the error begins with it. Values that a rank does not have are those of other slices or
// stages; those of two ranks are compared whichever these are.
std::string difference(const std::vector<std::string>& texts, const std::string& what,
                       bool have_slices, const std::function<int(int)>& name_of) {
  struct Told {
    size_t rank;
    std::string has;
  };
  std::vector<ToldByKey> by_rank;
  for (const std::string& text : texts) by_rank.push_back(from_text(text));
  const ToldByKey& first = by_rank.front();
  std::map<std::string, Told> known;
  for (const auto& [key, has] : first) known.emplace(key, Told{0, has});
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    const ToldByKey& own = by_rank[rank];
    Differences differences(by_rank, name_of);
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
    return c10::str(what, ". ", differences.words(), ". ",
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

RankAgreement::RankAgreement(const PageParts& parts)
    : pages_(parts.pages),
      writes_(parts.writes),
      replicated_(parts.pages, parts.memory),
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
  if (axis == Axis::kReplicas) {
    return replicated_.have_shards_alike() ? &*pages_->worlds().replicas : nullptr;
  }
  if (axis == Axis::kTied) {
    const auto& part = pages_->part();
    return part && part->tied ? &*part->tied : nullptr;
  }
  return axis == Axis::kTensor ? pages_->tensor_world() : pipeline_world_of(*pages_);
}

std::optional<ReplicatedValues::Hashes> RankAgreement::all_values() const {
  if (is_alone_ || pages_->options().compare_replicas == 0) return std::nullopt;
  ReplicatedValues::Hashes hashes = replicated_.hashes();
  if (beside_.hash) hashes.data += beside_.hash();
  return hashes;
}

void RankAgreement::begin_backward(Averages averages) {
  if (is_alone_) return;
  writes_->write_back();
  settle_what_differs("backward()");
  compared_.reset();
  if (averages == Averages::kNothing) return;
  values_ = writes_->user_writes().look(backwards_++);
  if (averages != Averages::kStep) return;
  const int64_t every = pages_->options().compare_replicas;
  if (every > 0 && (steps_made() + 1) % every == 0) compared_ = all_values();
  ++of_steps_;
}

uint64_t RankAgreement::values_along(Axis axis) const {
  const ReplicatedValues::Hashes all = compared_.value_or(ReplicatedValues::Hashes());
  switch (axis) {
    case Axis::kData:
      return values_.all + all.data;
    case Axis::kExperts:
      return values_.of_experts + all.experts;
    case Axis::kTensor:
      return values_.whole + all.tensor;
    case Axis::kReplicas:
      return all.replicas;
    case Axis::kTied:
      return all.tied;
    case Axis::kPipeline:
      return 0;
  }
  return 0;
}

AgreementHashes RankAgreement::own_hashes(Axis axis) const {
  if (is_alone_) return {};
  Fingerprint steps, settings;
  for (const Part& part : parts_) {
    const AgreementHashes of_part = part.own_hashes();
    steps.add(of_part.steps);
    settings.add(of_part.settings);
  }
  return {.steps = steps.value(), .settings = settings.value(), .values = values_along(axis)};
}

AgreementHashes RankAgreement::hashes_now() {
  if (!is_alone_) values_ = writes_->user_writes().look(backwards_);
  return own_hashes();
}

std::map<std::string, uint64_t> RankAgreement::values_now() {
  if (is_alone_) return {};
  const std::optional<ReplicatedValues::Hashes> before = std::exchange(compared_, all_values());
  hashes_now();
  const comm::World* const stages = along(Axis::kPipeline);
  const comm::World* const slices = along(Axis::kTensor);
  const int stage = stages == nullptr ? 0 : stages->rank();
  const int slice = slices == nullptr ? 0 : slices->rank();
  const std::string part = c10::str("stage ", stage, ", slice ", slice);
  const std::string samples = c10::str("samples of rank ", pages_->world().rank());
  std::map<std::string, uint64_t> values = {{part, values_along(Axis::kData)}};
  if (along(Axis::kExperts) != nullptr) {
    const int experts = pages_->worlds().experts->rank();
    values.emplace(c10::str("experts ", experts, " of ", part), values_along(Axis::kExperts));
  }
  if (slices != nullptr) {
    values.emplace(c10::str("whole on stage ", stage, ", ", samples), values_along(Axis::kTensor));
  }
  if (along(Axis::kReplicas) != nullptr) {
    const int shard = pages_->shards().rank();
    values.emplace(c10::str("shard ", shard, " of ", part), values_along(Axis::kReplicas));
  }
  if (along(Axis::kTied) != nullptr) {
    values.emplace(c10::str("tied, slice ", slice, ", ", samples), values_along(Axis::kTied));
  }
  compared_ = before;
  return values;
}

// At a step, since stages end their backwards at other moments.
void RankAgreement::compare_tied(const std::string& who) {
  if (compared_ && along(Axis::kTied) != nullptr) {
    const AgreementResult agreed_on =
        tell(Axis::kTied, own_hashes(Axis::kTied), "the values of a pipeline's tied weights");
    if (!agreed_on.values) settle(*along(Axis::kTied), who);
  }
  compared_.reset();
}

// All ranks and stages have made as many, or have been told that they have not.
int64_t RankAgreement::steps_made() const {
  if (parts_.empty()) return of_steps_;
  uint64_t steps = 0;
  for (const Part& part : parts_) steps = std::max(steps, part.own_hashes().steps);
  return static_cast<int64_t>(steps);
}

std::string RankAgreement::after_steps() const {
  const int64_t steps = steps_made();
  return c10::str(" after ", steps, parts_.empty() ? " backward" : " step", steps == 1 ? "" : "s");
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
        std::pair{Axis::kTensor, kAlikeAlongSlices},
        std::pair{Axis::kReplicas, "the shards that groups of shard_within have alike"}}) {
    if (along(axis) == nullptr || (axis == Axis::kReplicas && !compared_)) continue;
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
  compare_tied(who);
  UserWrites& writes = writes_->user_writes();
  // What was written into a step that a backward has made is refused by the update.
  const bool were_written = !writes_->is_any_in_update() && writes.has_news();
  if (settings() == agreed_settings_ && !were_written) return;
  values_ = writes.look(/*sample_round=*/std::nullopt);
  for (const Axis axis : kAxesOfChanges) {
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
  const TellValues tell_values = [&](const std::string& what, const std::string& has) {
    lines.push_back({Kind::kValues, what, has});
  };
  replicated_.describe(tell_values);
  if (beside_.describe) beside_.describe(tell_values);
  writes.describe(tell_values);
  const std::string differs =
      ranks.settle(who, to_text(lines), [&](const std::vector<std::string>& texts) {
        return difference(texts, who + ": ranks must have this alike" + after_steps(),
                          &ranks == pages_->tensor_world(),
                          [&ranks](int rank) { return ranks.global_rank(rank); });
      });
  ZP_CHECK(differs.empty(), differs);
  writes.forget();
}

}  // namespace zeropage::zero
