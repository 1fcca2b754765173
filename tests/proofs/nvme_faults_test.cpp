// Training with its state on a disk that errs, at each of its operations: the bits of training
// without, or an error that names what could not be read, and no step after it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/faulty_device.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"
#include "zeropage/zeropage.h"

namespace zeropage::nvme_faults_test {
namespace {

using namespace zeropage::testing;
using memory::Tier;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using memory::operator""_KiB;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

constexpr int kSteps = 3;
constexpr int kForGood = 1000;  // more operations than there are

struct Outcome {
  std::vector<torch::Tensor> values;
  std::string error;  // "": none
  int reads = 0;
  int writes = 0;
};

class NvmeFaultsTest : public ::testing::TestWithParam<StepWhen> {
 protected:
  // On a disk that errs so; kDevice: on none.
  Outcome train(Tier tier, const std::vector<DeviceScript::Fault>& faults = {}) const {
    const auto script = std::make_shared<DeviceScript>();
    script->faults = faults;
    Options options;
    options.page_bytes = 4_KiB;
    options.offload.optimizer = tier;
    if (tier == Tier::kNvme) {
      options.offload.step = GetParam();
      options.offload.nvme_directory = folder_.path();
    }
    const offload::detail::WrappedDisk disk(folder_.path(), faulty(script));
    Outcome outcome;
    run_ranks(1, [&](comm::World& world) {
      outcome.error = words_of([&] {
        torch::manual_seed(7);
        DistributedDataParallel<Transformer> model(Transformer(), world, options);
        Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
        for (int step = 0; step < kSteps; ++step) {
          const Samples samples = samples_of(/*rank=*/0, step);
          try {
            optimizer.zero_grad();
            loss_of(model(samples.inputs), samples).backward();
            optimizer.step();
          } catch (const std::exception&) {
            EXPECT_THAT(words_of([&] { optimizer.step(); }), Not(IsEmpty()));
            throw;
          }
        }
        for (const auto& parameter : model.parameters()) {
          outcome.values.push_back(parameter.clone());
        }
      });
    });
    outcome.reads = script->reads;
    outcome.writes = script->writes;
    return outcome;
  }

  static std::string words_of(const std::function<void()>& work) {
    try {
      work();
    } catch (const std::exception& error) {
      return memory::message_of(error);
    }
    return "";
  }

 private:
  const DiskFolder folder_;
};

TEST_P(NvmeFaultsTest, AnyOperationMayFailOnceOrComeShort) {
  const Outcome plain = train(Tier::kDevice);
  const Outcome whole = train(Tier::kNvme);
  ASSERT_TRUE(same_bits(plain.values, whole.values));
  ASSERT_GE(whole.reads, 8);
  for (const auto direction : {Direction::kRead, Direction::kWrite}) {
    for (int n = 0; n < (direction == Direction::kRead ? whole.reads : whole.writes); ++n) {
      for (const int error : {0, EIO}) {
        const Outcome outcome =
            train(Tier::kNvme,
                  {{.direction = direction, .first = n, .error = error, .short_bytes = 5000}});
        EXPECT_THAT(outcome.error, IsEmpty());
        EXPECT_TRUE(same_bits(plain.values, outcome.values)) << "operation " << n;
      }
    }
  }
}

TEST_P(NvmeFaultsTest, FromAnyWriteOnTheDiskMayBeFullOrBroken) {
  const Outcome plain = train(Tier::kDevice);
  const Outcome whole = train(Tier::kNvme);
  for (int n = 0; n < whole.writes; ++n) {
    for (const int error : {ENOSPC, EIO}) {
      ::testing::internal::CaptureStderr();
      const Outcome outcome =
          train(Tier::kNvme,
                {{.direction = Direction::kWrite, .first = n, .count = kForGood, .error = error}});
      const std::string warning = ::testing::internal::GetCapturedStderr();
      EXPECT_THAT(outcome.error, IsEmpty());
      EXPECT_TRUE(same_bits(plain.values, outcome.values)) << "write " << n;
      EXPECT_THAT(warning, HasSubstr("host memory"));
    }
  }
}

TEST_P(NvmeFaultsTest, AReadThatFailsOrIsNotWhatWasWrittenEndsTheRunByName) {
  const Outcome plain = train(Tier::kDevice);
  const Outcome whole = train(Tier::kNvme);
  const auto expect_end = [](const Outcome& outcome, const std::string& what) {
    EXPECT_THAT(outcome.error, HasSubstr(what));
    EXPECT_THAT(outcome.error, AnyOf(HasSubstr("values: "), HasSubstr("optimizer-state: ")));
    EXPECT_THAT(outcome.values, IsEmpty());
  };
  for (int n = 0; n < whole.reads; ++n) {
    expect_end(train(Tier::kNvme, {{.first = n, .count = kForGood, .error = EIO}}),
               "Input/output error");
  }
  int ends = 0;
  for (int n = 0; n < whole.writes; ++n) {
    const Outcome outcome =
        train(Tier::kNvme, {{.direction = Direction::kWrite, .first = n, .lies = true}});
    if (!outcome.error.empty()) {
      ++ends;
      expect_end(outcome, "expected checksum");
    } else {
      // Nobody read it: it was written again, or the last step's.
      EXPECT_TRUE(same_bits(plain.values, outcome.values)) << "write " << n;
    }
  }
  EXPECT_GT(ends, whole.reads / 2);
}

INSTANTIATE_TEST_SUITE_P(When, NvmeFaultsTest,
                         ::testing::Values(StepWhen::kInStep, StepWhen::kInBackward),
                         [](const auto& info) {
                           return info.param == StepWhen::kInStep ? "InStep" : "InBackward";
                         });

}  // namespace
}  // namespace zeropage::nvme_faults_test
