#include "train_imagenet/reports.h"

#include <cstdio>

#include "progress/words.h"

namespace train_imagenet {
namespace {

nlohmann::json metrics_of(const std::string& of, const Place& place, const Score& score) {
  return {{"of", of},
          {"step", place.step},
          {"epoch", place.epochs_made()},
          {"loss", score.loss()},
          {"top1", score.top1()},
          {"top5", score.top5()},
          {"samples", score.samples()}};
}

}  // namespace

void Reports::begin() {
  since_last_ = {};
  began_ = std::chrono::steady_clock::now();
}

void Reports::training(const zeropage::World& world, const Place& place, double learning_rate) {
  const Score score = since_last_.over_ranks(world);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began_;
  const double speed = static_cast<double>(score.samples()) / seconds.count();
  const std::chrono::duration<double> here = std::chrono::steady_clock::now() - started_;
  const double left =
      here.count() / static_cast<double>(place.steps_here) * static_cast<double>(place.steps_left);
  out_.tell_progress(examples::line_of(
      {c10::str("epoch ", place.epoch + 1, "/", place.epochs, " step ", place.in_epoch, "/",
                place.of_epoch),
       "loss " + examples::fixed(score.loss(), 4),
       "top-1 " + examples::fixed(100 * score.top1(), 2) + " %", examples::duration(left) + " left",
       examples::fixed(speed, 1) + " images/s", c10::str("rate ", learning_rate)}));
  nlohmann::json metrics = metrics_of("training", place, score);
  metrics["learning_rate"] = learning_rate;
  metrics["images_per_second"] = speed;
  out_.add_metrics(metrics);
  begin();
}

void Reports::validation(const std::string& of, const Place& place, const Score& score,
                         bool keeps) {
  char line[200];
  std::snprintf(line, sizeof(line), "%s: step %ld, loss %.9g, top-1 %.9g, top-5 %.9g of %ld images",
                of.c_str(), static_cast<long>(place.step), score.loss(), score.top1(), score.top5(),
                static_cast<long>(score.samples()));
  out_.tell(line);
  if (keeps) out_.add_metrics(metrics_of(of, place, score));
}

}  // namespace train_imagenet
