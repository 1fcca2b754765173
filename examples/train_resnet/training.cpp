#include "train_resnet/training.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <mutex>
#include <numbers>
#include <optional>
#include <thread>

#include <zeropage/check.h>
#include <zeropage/data/distributed_sampler.h>
#include <zeropage/data/labelled_images.h>
#include <zeropage/data/prefetching_loader.h>
#include <zeropage/data/transforms.h>
#include <zeropage/state_folder.h>

#include "command_line/stop_signal.h"
#include "image_models/resnet.h"
#include "progress/words.h"
#include "weights_hash/weights_hash.h"

namespace train_resnet {
namespace {

namespace data = zeropage::data;
using image_models::ResNet;
using Clock = std::chrono::steady_clock;

// Over all training images of Fashion-MNIST.
constexpr double kMean = 0.2860;
constexpr double kDeviation = 0.3530;
constexpr int64_t kPadding = 4;
// Memory is made and the order of pages recorded in these steps; they are not measured.
constexpr int64_t kWarmUpSteps = 2;

struct Images {
  explicit Images(const std::string& folder)
      : training(read(folder, "train")), test(read(folder, "t10k")) {}

  static data::LabelledImages read(const std::string& folder, const std::string& part) {
    const std::string begin = folder + "/" + part;
    return data::read_idx_images(begin + "-images-idx3-ubyte.gz", begin + "-labels-idx1-ubyte.gz");
  }

  data::LabelledImages training, test;
};

// The samples' images, each transformed with the random numbers of the epoch and of its own.
data::PrefetchingLoader::Batch batch_of(const data::LabelledImages& images,
                                        const data::Transform& transform, uint64_t seed,
                                        const std::vector<int64_t>& samples, int64_t epoch) {
  const auto chosen = images.of(samples);
  torch::Tensor inputs = torch::empty(chosen.images.sizes(), torch::kFloat);
  for (size_t i = 0; i < samples.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    inputs[at].copy_(transform(chosen.images[at], data::SampleRandom(seed, epoch, samples[i])));
  }
  return {inputs, chosen.labels};
}

// Threads share the generator that modules draw from, so ranks construct one after the other.
ResNet made_alike(const Flags& flags) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(flags.seed);
  auto options = image_models::ResNetOptions::resnet18(
      {.classes = 10, .channels = 1, .image_side = 28, .width = flags.width});
  options.stem = image_models::Stem::kSmall;
  return ResNet(options);
}

ResNet prepared(const Flags& flags, const zeropage::World& world) {
  ResNet net = made_alike(flags);
  net->to(world.device());
  if (flags.sync_batch_norm) zeropage::sync_batch_norm(net, world);
  return net;
}

// Sums over the samples of this rank; over those of all ranks once they are added up.
struct Score {
  double loss = 0;
  double right = 0;
  double seen = 0;

  void add(const torch::Tensor& outputs, const torch::Tensor& labels, double mean_loss) {
    right += outputs.argmax(1).eq(labels).sum().item<double>();
    loss += mean_loss * static_cast<double>(labels.size(0));
    seen += static_cast<double>(labels.size(0));
  }
  std::string words() const {
    return "loss " + examples::fixed(loss / seen, 6) + " acc " +
           examples::fixed(100 * right / seen, 2) + " %";
  }
  Score over_ranks(const zeropage::World& world) const {
    return {world.sum(loss), world.sum(right), world.sum(seen)};
  }
};

class Run {
 public:
  Run(const Flags& flags, zeropage::World& world)
      : flags_(flags),
        world_(world),
        images_(flags.data),
        augment_(data::chain({data::random_crop(images_.training.images.size(3), kPadding),
                              data::random_flip(), data::normalise({kMean}, {kDeviation})})),
        as_they_are_(data::chain({data::normalise({kMean}, {kDeviation})})),
        model_(prepared(flags, world), world, options_of(flags)),
        optimizer_(model_, torch::optim::SGDOptions(flags.learning_rate)
                               .momentum(flags.momentum)
                               .weight_decay(flags.weight_decay)),
        loader_(
            data::DistributedSampler(images_.training.size(), {.rank = world.rank(),
                                                               .ranks = world.size(),
                                                               .batch = flags.batch / world.size(),
                                                               .last = data::LastBatch::kDropped,
                                                               .seed = flags.seed}),
            [this](const std::vector<int64_t>& samples, int64_t epoch) {
              return batch_of(images_.training, augment_, flags_.seed, samples, epoch);
            },
            {.threads = flags.loader_threads}) {
    state_.extras["loader"] = zeropage::RunExtra::of(loader_);
    if (!flags.save.empty()) {
      // Before a state is looked for: from here on no former start of this run saves any more.
      saver_.emplace(flags.save, world_,
                     zeropage::StateSaverOptions{.keep_last = 2, .on_signal = true});
    }
    resume();
    if (!saver_) return;
    const auto newest = zeropage::state::newest_step_in(flags.save);
    ZP_CHECK(!newest || *newest <= state_.step || !flags.resume.empty(), "--save ", flags.save,
             ": has step-", newest.value_or(0),
             " of another run; give --auto-resume to go on with it, or another folder");
    zeropage::check_can_save(flags.save, model_, optimizer_);
  }

  // Returns the signal that ended it after a save, 0 for none.
  int train() {
    for (int64_t epoch = loader_.epoch(); epoch < flags_.epochs && !is_over(); ++epoch) {
      loader_.set_epoch(epoch);
      while (!is_over()) {
        const auto start = Clock::now();
        const auto batch = loader_.next();
        if (!batch) break;
        step(*batch);
        if (++steps_here_ > kWarmUpSteps) {
          seconds_ += std::chrono::duration<double>(Clock::now() - start).count();
          trained_ += batch->target.size(0) * world_.size();
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(flags_.pause_ms));
        if (const int signal = ends_after_save()) return signal;
      }
      check_finite();
      report("epoch", test_ = evaluate());
    }
    if (saver_) saver_->wait();
    return 0;
  }

  // Over all test images, each once.
  Score evaluate() {
    const torch::NoGradGuard no_grad;
    model_.eval();
    data::DistributedSampler sampler(images_.test.size(), {.rank = world_.rank(),
                                                           .ranks = world_.size(),
                                                           .batch = flags_.batch,
                                                           .order = data::Order::kAsTheyAre});
    Score score;
    while (const auto samples = sampler.next()) {
      const auto batch = batch_of(images_.test, as_they_are_, flags_.seed, *samples, 0);
      const torch::Tensor outputs = model_(batch.data.to(world_.device()));
      const torch::Tensor targets = batch.target.to(world_.device());
      const bool is_empty = samples->empty();
      score.add(outputs, targets,
                is_empty ? 0 : torch::cross_entropy_loss(outputs, targets).item<double>());
    }
    model_.train();
    return score.over_ranks(world_);
  }

  Figures figures(const std::string& way) {
    if (test_.seen == 0) test_ = evaluate();
    const auto memory = zeropage::memory_report(world_);
    int64_t peak = 0;
    for (const auto& rank : memory.ranks) peak = std::max(peak, rank.at_peak.total());
    // A run that was resumed at its end has trained nothing.
    const double rate = trained_ == 0 ? 0 : static_cast<double>(trained_) / seconds_;
    const zeropage::GatheredParameters whole(model_);
    train_gpt::WeightsHash hash;
    for (const torch::Tensor& parameter : model_.parameters()) hash.add(parameter.detach());
    const std::string weights = hash.hex();
    report_by_rank("weights_sha256 " + weights.substr(0, 16) + "...");
    return {
        .way = way,
        .stage = flags_.stage,
        .steps = state_.step,
        .seconds_an_epoch = trained_ == 0 ? 0 : static_cast<double>(images_.training.size()) / rate,
        .images_a_second = rate,
        .loss = world_.mean(last_loss_),
        .peak_bytes = peak,
        .accuracy = test_.right / test_.seen,
        .weights_sha256 = weights};
  }

 private:
  void resume() {
    if (!flags_.resume.empty()) {
      told(zeropage::load_state(flags_.resume, model_, optimizer_, state_,
                                {.optimizer_options = false}));
      return;
    }
    // What rank 0 sees decides, as ranks may see a shared folder at different moments.
    const bool has_state = flags_.auto_resume && world_.rank() == 0 &&
                           !zeropage::state::states_in(flags_.save).empty();
    if (world_.sum(has_state ? 1.0 : 0.0) == 0) return;
    const auto loaded = zeropage::load_state(flags_.save, model_, optimizer_, state_,
                                             {.fall_back = true, .optimizer_options = false});
    told(loaded);
  }

  // What the command line says counts; where the state had other options, a note tells.
  void told(const zeropage::LoadReport& loaded) const {
    if (world_.rank() != 0) return;
    std::printf("goes on after step %ld, from %s\n", static_cast<long>(state_.step),
                loaded.directory.c_str());
    for (const std::string& note : loaded.notes) std::printf("%s\n", note.c_str());
    std::fflush(stdout);
  }

  // A state that is not finite would replace those that one could go back to. Collective.
  void check_finite() {
    const torch::NoGradGuard no_grad;
    bool all = true;
    for (const torch::Tensor& parameter : model_.parameters()) {
      all &= parameter.isfinite().all().item<bool>();
    }
    for (const torch::Tensor& buffer : model_.buffers()) {
      all &= buffer.isfinite().all().item<bool>();
    }
    ZP_CHECK(
        world_.sum(all ? 0.0 : 1.0) == 0, "step ", state_.step,
        ": a weight or a running statistic is not finite, so training cannot go on and no state "
        "is saved; lower --lr, and go on from the last state");
  }

  // Saves where it is time to. Returns the signal by which the run ends here though its training is not over; 0 for none.
  int ends_after_save() {
    if (!saver_) return 0;
    const int signal = saver_->stop_signal();
    const bool is_time = flags_.save_every > 0 && state_.step % flags_.save_every == 0;
    if (signal != 0 || is_time || is_over()) {
      check_finite();
      saver_->save(model_, optimizer_, state_);
    }
    if (signal == 0 || is_over()) return 0;
    saver_->wait();
    if (world_.rank() == 0) {
      std::printf("%s: ended after the save of step %ld; --auto-resume goes on\n",
                  examples::name_of(signal), static_cast<long>(state_.step));
      std::fflush(stdout);
    }
    return signal;
  }

  static zeropage::Options options_of(const Flags& flags) {
    zeropage::Options options;
    options.stage = zeropage::stage_of(flags.stage);
    return options;
  }

  int64_t last_step() const {
    const int64_t all = flags_.epochs * loader_.batches();
    return flags_.steps > 0 ? std::min(all, flags_.steps) : all;
  }
  bool is_over() const { return state_.step >= last_step(); }

  void step(const data::PrefetchingLoader::Batch& batch) {
    const auto all = static_cast<double>(flags_.epochs * loader_.batches());
    const double progress = static_cast<double>(state_.step) / all;
    const double rate = flags_.learning_rate * (1 + std::cos(std::numbers::pi * progress)) / 2;
    for (auto& group : optimizer_.param_groups()) group.options().set_lr(rate);
    const torch::Tensor outputs = model_(batch.data.to(world_.device()));
    const torch::Tensor targets = batch.target.to(world_.device());
    const torch::Tensor loss = torch::cross_entropy_loss(outputs, targets);
    optimizer_.zero_grad();
    loss.backward();
    optimizer_.step();
    ++state_.step;
    last_loss_ = loss.item<double>();
    since_report_.add(outputs, targets, last_loss_);
    const int64_t in_epoch = loader_.position() / flags_.batch;
    if (in_epoch % flags_.report_every == 0 || in_epoch == loader_.batches()) {
      report("step", since_report_.over_ranks(world_));
      report_by_rank(since_report_.words());
      since_report_ = {};
    }
  }

  // What every rank has by itself, in a line each. Collective.
  void report_by_rank(const std::string& words) const {
    if (!flags_.by_rank) return;
    const auto all = world_.gather_text("figures by rank", words);
    for (size_t rank = 0; world_.rank() == 0 && rank < all.size(); ++rank)
      std::printf("  rank %zu: %s\n", rank, all[rank].c_str());
    std::fflush(stdout);
  }

  void report(const char* what, const Score& score) const {
    if (world_.rank() != 0) return;
    const auto step = static_cast<long>(loader_.position() / flags_.batch);
    const auto epoch = static_cast<long>(loader_.epoch() + 1),
               epochs = static_cast<long>(flags_.epochs);
    if (what == std::string("step")) {
      std::printf("step [%ld/%ld] ", step, static_cast<long>(loader_.batches()));
    } else {
      std::printf("test ");
    }
    std::printf("epoch [%ld/%ld] %s\n", epoch, epochs, score.words().c_str());
    std::fflush(stdout);
  }

  const Flags& flags_;
  zeropage::World world_;
  const Images images_;
  const data::Transform augment_, as_they_are_;
  zeropage::DistributedDataParallel<ResNet> model_;
  zeropage::Optimizer<torch::optim::SGD> optimizer_;
  data::PrefetchingLoader loader_;
  zeropage::RunState state_;
  std::optional<zeropage::StateSaver> saver_;
  Score since_report_;
  Score test_;  // the last one
  double last_loss_ = 0;
  int64_t steps_here_ = 0;  // of this process
  int64_t trained_ = 0;     // images, of all ranks, after the warm-up
  double seconds_ = 0;      // in which they were
};

}  // namespace

Ended train(const Flags& flags, zeropage::World& world, const std::string& way) {
  ZP_CHECK(flags.batch % world.size() == 0, "--batch ", flags.batch, " cannot be shared by ",
           world.size(), " ranks; give a multiple of ", world.size());
  Run run(flags, world);
  if (const int signal = run.train()) return {.figures = std::nullopt, .signal = signal};
  return {.figures = run.figures(way)};
}

}  // namespace train_resnet
