#include "train_imagenet/training.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>

#include <zeropage/check.h>

#include "command_line/stop_signal.h"
#include "progress/told_if_slow.h"
#include "train_imagenet/config_keys.h"
#include "train_imagenet/image_data.h"
#include "train_imagenet/out_folder.h"
#include "train_imagenet/reports.h"
#include "train_imagenet/schedule.h"
#include "train_imagenet/trained_model.h"
#include "train_imagenet/validation.h"
#include "weights_hash/weights_hash.h"

namespace train_imagenet {
namespace {

namespace data = zeropage::data;

// Skipped steps one after the other, after which a run does not recover.
constexpr int64_t kMostSkipped = 20;

class Run {
 public:
  Run(const Config& config, const image_models::ModelRegistry& models, zeropage::World& world)
      : config_(config),
        world_(world),
        out_(config, world),
        images_(read_images(config, world, out_)),
        trained_(config, make_network(config, models, images_.classes(), world), world),
        loader_(data::DistributedSampler(
                    images_.training().size(),
                    {.rank = world.rank(),
                     .ranks = world.size(),
                     // With EVAL_ONLY it is of no use, and ranks may be more.
                     .batch = std::max<int64_t>(1, config.train.batch / world.size()),
                     .last = data::LastBatch::kDropped,
                     .seed = static_cast<uint64_t>(config.train.seed)}),
                [this](const std::vector<int64_t>& samples, int64_t epoch) {
                  return images_.training_batch(samples, epoch);
                },
                {.threads = static_cast<int>(config.data.loader_threads)}) {
    state_.accumulator = &trained_.accumulator();
    state_.average = trained_.average();
    state_.extras["loader"] = zeropage::RunExtra::of(loader_);
    introduce();
    out_.begin(config, images_.class_names(), images_.lists(), world_);
    if (!config.eval_only) {
      // Before a state is looked for: from here on no former start of this run saves any more.
      saver_.emplace(
          out_.states(), world_,
          zeropage::StateSaverOptions{.keep_last = config.run.keep_states, .on_signal = true});
    }
    resume();
  }

  void train() {
    if (config_.eval_only) {
      validate_all();
      return;
    }
    zeropage::check_can_save(out_.states(), trained_.model(), trained_.optimizer());
    for (int64_t epoch = loader_.epoch(); epoch < config_.train.epochs; ++epoch) {
      loader_.set_epoch(epoch);
      train_epoch();
      if (ends_) break;
    }
    saver_->wait();
    if (stopped_by_ != 0) {
      out_.tell(c10::str("stopped by ", examples::name_of(stopped_by_), " at step ", state_.step,
                         "; the same command goes on"));
      return;
    }
    // They are no states of the run.
    zeropage::SaveOptions options{.update_latest = false};
    zeropage::save_weights(out_.file("weights"), trained_.model(), state_, options);
    if (trained_.average() == nullptr) return;
    options.weights_as = zeropage::WeightsAs::kAverage;
    zeropage::save_weights(out_.file("average"), trained_.model(), state_, options);
  }

  // The signal that ended it after a save, 0 for none.
  int stopped_by() const { return stopped_by_; }

  std::string weights_sha256() {
    const zeropage::GatheredParameters whole(trained_.model());
    train_gpt::WeightsHash hash;
    for (const torch::Tensor& parameter : trained_.model().parameters()) {
      hash.add(parameter.detach());
    }
    return hash.hex();
  }

 private:
  static int reading_threads(const zeropage::World& world) {
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / world.local_size());
  }

  static ImageData read_images(const Config& config, const zeropage::World& world, OutFolder& out) {
    // Nothing else tells until the images are read.
    const examples::ToldIfSlow telling(std::chrono::seconds(1), [&] {
      out.tell((config.data.in_memory ? "reading the images of " : "listing the images of ") +
               config.data.train + " ...");
    });
    return {config, reading_threads(world)};
  }

  void introduce() {
    for (const std::string& skipped : images_.skipped()) out_.tell("skipped " + skipped);
    out_.tell(c10::str(config_.model.name, ": ", images_.classes(), " classes, ",
                       images_.training().size(), " images to train on, ",
                       images_.validation().size(), " to validate; ", world_.size(),
                       world_.size() == 1 ? " rank" : " ranks", ", batch ", config_.train.batch,
                       ", learning rate ", base_rate(config_)));
    if (!trained_.note().empty()) out_.tell(trained_.note());
  }

  void resume() {
    const bool goes_on = (config_.auto_resume || config_.eval_only) && out_.has_state(world_);
    // Weights that are given are what EVAL_ONLY is to validate.
    if (!goes_on || (config_.eval_only && !config_.load_weights.empty())) {
      ZP_CHECK(!config_.eval_only || !config_.load_weights.empty(), "EVAL_ONLY: OUT_DIR ",
               config_.out_dir, " has no state; train first, or give LOAD_WEIGHTS FILE");
      seed_rank(0);
      if (!config_.eval_only) out_.rewind_metrics(-1);
      return;
    }
    seed_rank(0);
    const auto report =
        zeropage::load_state(out_.states(), trained_.model(), trained_.optimizer(), state_,
                             {.fall_back = true, .optimizer_options = false});
    for (const std::string& note : report.notes) out_.tell(note);
    // Masks are drawn anew where the state's generators are of other ranks.
    if (!report.random_goes_on) seed_rank(state_.step);
    if (!config_.eval_only) out_.rewind_metrics(state_.step);
    out_.tell(c10::str("goes on from ", report.directory.string(), ": step ", state_.step,
                       ", epoch ", loader_.epoch() + 1, ", sample ", loader_.position()));
    saved_step_ = first_step_ = state_.step;
    ends_ = is_over();
  }

  // Dropout draws other numbers on each rank.
  void seed_rank(int64_t step) const {
    data::SampleRandom random(static_cast<uint64_t>(config_.train.seed), step, world_.rank());
    torch::manual_seed(random.next());
  }

  // By epochs and not by their steps: those that were made before may have had another batch.
  bool is_over() const {
    const bool has_all_steps = config_.train.steps > 0 && state_.step >= config_.train.steps;
    return has_all_steps || (is_last_epoch() && place().in_epoch >= loader_.batches());
  }
  bool is_last_epoch() const { return loader_.epoch() + 1 >= config_.train.epochs; }
  int64_t steps_left() const {
    const int64_t of_epochs = (config_.train.epochs - loader_.epoch()) * loader_.batches() -
                              loader_.position() / config_.train.batch;
    return config_.train.steps > 0 ? std::min(of_epochs, config_.train.steps - state_.step)
                                   : of_epochs;
  }
  Place place() const {
    return {.step = state_.step,
            .epoch = loader_.epoch(),
            .epochs = config_.train.epochs,
            .in_epoch = loader_.position() / config_.train.batch,
            .of_epoch = loader_.batches(),
            .steps_here = state_.step - first_step_,
            .steps_left = steps_left()};
  }

  void train_epoch() {
    reports_.begin();
    while (!ends_) {
      const Place before = place();
      const data::SampleRandom random(static_cast<uint64_t>(config_.train.seed), before.epoch,
                                      loader_.position());
      const auto batch = loader_.next();
      if (!batch) {
        ends_ = is_last_epoch();
        break;
      }
      step({*batch, rate_at(config_, before.epochs_made()), random});
      stopped_by_ = saver_->stop_signal();
      ends_ = stopped_by_ != 0 || is_over();
      const bool is_time = config_.run.save_every > 0 && state_.step % config_.run.save_every == 0;
      if (is_time || stopped_by_ != 0) save();
    }
    if (stopped_by_ != 0) return;
    // First, so that what ends a validation loses no epoch: whoever goes on validates it again.
    if (config_.run.save_every == 0 || ends_) save();
    validate_all();
    tell_broken_files();
    if (ends_) return;
    stopped_by_ = saver_->stop_signal();
    ends_ = stopped_by_ != 0;
    if (ends_) save();
  }

  void tell_broken_files() {
    const double count = world_.sum(static_cast<double>(images_.broken_files()));
    if (count > 0) {
      out_.tell(
          c10::str("files that could not be read, of all ranks: ", static_cast<int64_t>(count)));
    }
  }

  // Running statistics and weights that are not finite would replace those that one could go back to.
  void save() {
    if (saved_step_ == state_.step) return;
    ZP_CHECK(trained_.is_finite(world_), "step ", state_.step,
             ": a weight or a running statistic is not finite, so the state is not saved; the last "
             "one is of step ",
             std::max<int64_t>(saved_step_, 0),
             ". Lower OPTIMIZER.LEARNING_RATE, or set TRAIN.CLIP_NORM, and go on from there");
    saver_->save(trained_.model(), trained_.optimizer(), state_);
    saved_step_ = state_.step;
  }

  void step(const StepInput& input) {
    const zeropage::StepReport report = trained_.step(input, reports_.since_last());
    ++state_.step;
    state_.samples += config_.train.batch;
    skipped_ = report.stepped() ? 0 : skipped_ + 1;
    if (!report.stepped()) {
      out_.tell(c10::str("step ", state_.step, ": ", report.to_string()));
    }
    ZP_CHECK(skipped_ < kMostSkipped, "step ", state_.step, ": the last ", skipped_,
             " steps were skipped, as gradients are not finite; lower OPTIMIZER.LEARNING_RATE, or "
             "set TRAIN.CLIP_NORM, and go on from the last state");
    const Place now = place();
    if (now.in_epoch % config_.run.report_every == 0 || now.in_epoch == now.of_epoch) {
      reports_.training(world_, now, input.learning_rate);
    }
  }

  void validate_all() {
    validate_one("validation");
    if (zeropage::WeightAverage* const average = trained_.average()) {
      average->swap_in();
      validate_one("average");
      average->swap_out();
    }
    if (!config_.eval_only) out_.draw_curves();
  }

  void validate_one(const std::string& of) {
    const Score score = validate(trained_, images_, config_.run.validation_batch, world_);
    reports_.validation(of, place(), score, /*keeps=*/!config_.eval_only);
  }

  const Config& config_;
  zeropage::World world_;
  OutFolder out_;
  const ImageData images_;
  TrainedModel trained_;
  data::PrefetchingLoader loader_;
  zeropage::RunState state_;
  std::optional<zeropage::StateSaver> saver_;  // unless EVAL_ONLY
  Reports reports_{out_};
  int64_t saved_step_ = -1;
  int64_t first_step_ = 0;  // after which this process began
  int64_t skipped_ = 0;     // steps, one after the other
  bool ends_ = false;
  int stopped_by_ = 0;
};

}  // namespace

Ended run(const Config& config, const image_models::ModelRegistry& models, zeropage::World& world) {
  check(config, world.size());
  Run run(config, models, world);
  run.train();
  if (run.stopped_by() != 0) return {.weights_sha256 = "", .signal = run.stopped_by()};
  return {.weights_sha256 = run.weights_sha256()};
}

}  // namespace train_imagenet
