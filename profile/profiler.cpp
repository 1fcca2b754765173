#include "zeropage/profiler.h"

#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/core/DeviceType.h>

#include "profile/detail/names_of_accounts.h"
#include "profile/operator_names.h"
#include "profile/recorder.h"
#include "profile/report/profile_file.h"
#include "zeropage/check.h"

namespace zeropage::profile {
namespace {

using memory::Account;

Account account_of(c10::DeviceType device) {
  if (device == c10::DeviceType::CPU) return Account::kHost;
  return device == c10::DeviceType::Meta ? Account::kMeta : Account::kAccelerator;
}

// One after the other, so that rank 0 has one text more than its own at a time.
std::string exchange_texts(comm::Communicator& communicator, int from, const std::string& own) {
  const std::string what = "the profile of rank " + std::to_string(from);
  const at::TensorOptions on_host(c10::kCPU);
  const bool gives = communicator.rank() == from;
  const at::Tensor length = at::empty({1}, on_host.dtype(at::kLong));
  if (gives) length.fill_(static_cast<int64_t>(own.size()));
  (gives ? communicator.send(length, 0, what) : communicator.recv(length, from, what)).wait();
  const at::Tensor bytes = at::empty({length.item<int64_t>()}, on_host.dtype(at::kByte));
  if (gives) {
    std::memcpy(bytes.mutable_data_ptr(), own.data(), own.size());
    communicator.send(bytes, 0, what).wait();
    return {};
  }
  communicator.recv(bytes, from, what).wait();
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())};
}

}  // namespace

struct Profiler::Parts {
  std::shared_ptr<Recorder> recorder = Recorder::make(memory::Ledger::current());
  std::optional<OperatorNames> names;  // while it is attached
  std::vector<int64_t> formula;
  std::vector<std::pair<std::string, std::string>> facts;
  bool in_step = false;
  int64_t last_number = -1;
};

Profiler::Profiler(comm::World world, ProfilerOptions options)
    : world_(std::move(world)), options_(std::move(options)), parts_(std::make_unique<Parts>()) {
  ZP_CHECK(options_.first_step >= 0 && options_.last_step >= options_.first_step,
           "ProfilerOptions: expected steps from 0 on, and a last_step that is no smaller than "
           "first_step, got first_step ",
           options_.first_step, " and last_step ", options_.last_step);
}

Profiler::~Profiler() {
  parts_->recorder->detach();
}

Profiler::Step::~Step() {
  if (profiler_ != nullptr) profiler_->end_step();
}

Profiler::Step Profiler::step(int64_t number, const std::string& label) {
  ZP_CHECK(!parts_->in_step, "Profiler::step(", number,
           "): the step before it is still being recorded; let what step() returned end first");
  if (number > options_.last_step) stop_looking();
  if (number < options_.first_step || number > options_.last_step) return Step(nullptr);
  ZP_CHECK(number > parts_->last_number, "Profiler::step(", number, "): step ", parts_->last_number,
           " was recorded before; number steps upwards");
  if (!parts_->recorder->is_attached()) {
    parts_->recorder->attach();
    parts_->names.emplace();
  }
  parts_->in_step = true;
  parts_->last_number = number;
  parts_->recorder->begin_step(number, label);
  return Step(this);
}

void Profiler::end_step() {
  parts_->recorder->end_step();
  parts_->in_step = false;
  if (parts_->last_number >= options_.last_step) stop_looking();
}

void Profiler::stop_looking() {
  parts_->names.reset();
  parts_->recorder->detach();
}

void Profiler::set_formula(const memory::Breakdown& bytes) {
  parts_->formula.assign(bytes.bytes.begin(), bytes.bytes.end());
}

void Profiler::note(const std::string& what, const std::string& value) {
  parts_->facts.emplace_back(what, value);
}

Profile Profiler::join() const {
  ZP_CHECK(!parts_->in_step, "Profiler::join(): a step is being recorded; let it end first");
  Profile profile = detail::named_profile();
  profile.title = options_.title;
  profile.facts = parts_->facts;
  const c10::Device device = world_.device();
  profile.device = static_cast<uint8_t>(account_of(device.type()));
  profile.ranks.push_back(parts_->recorder->profile(world_.rank()));
  profile.ranks.back().formula = parts_->formula;
  // The other ranks of a simulated world are not there.
  if (device.is_meta() || world_.size() == 1) return profile;
  const std::string own = world_.rank() == 0 ? std::string() : to_json(profile);
  for (int rank = 1; rank < world_.size(); ++rank) {
    if (world_.rank() != 0 && world_.rank() != rank) continue;
    const std::string text = exchange_texts(world_.communicator(), rank, own);
    if (world_.rank() != 0) return {};
    Profile of_rank = parse_profile(text, "the profile of rank " + std::to_string(rank));
    profile.ranks.push_back(std::move(of_rank.ranks.front()));
  }
  return profile;
}

void Profiler::write(const ProfileFiles& files) const {
  const std::string unfit = check_names(files);
  ZP_CHECK(unfit.empty(), "Profiler::write(): ", unfit);
  const Profile profile = join();
  const auto write_all = [&](const std::vector<std::string>& /*texts*/) -> std::string {
    try {
      write_files(profile, files);
      return {};
    } catch (const std::exception& error) {
      return error.what();
    }
  };
  const std::string error = world_.settle("writing the profile", "", write_all);
  ZP_CHECK(error.empty(), "Profiler::write(): ", error);
}

}  // namespace zeropage::profile
