// What a script's own object, such as a schedule that is no LRScheduler, keeps in a state.
//
//   run.extras["schedule"] = {[&] { return std::to_string(schedule.step); },
//                             [&](const std::string& text) { schedule.step = std::stol(text); }};
//   run.extras["sampler"] = zeropage::RunExtra::of(sampler);  // that has save(archive), load(archive)
//
// The objects outlive the saves and loads that name them. Threads: called on the training thread.
#pragma once

#include <functional>
#include <string>

#include <torch/serialize/archive.h>

namespace zeropage {

struct RunExtra {
  // What is to be kept, alike on all ranks: UTF-8 text of any length, such as JSON or numbers. Called by a
  // save, between steps. What it throws, all ranks throw, and nothing is saved.
  std::function<std::string()> save;
  // Takes it back. Called by a load, when the model has its values.
  std::function<void(const std::string&)> load;

  // An extra that saves an object with void save(torch::serialize::OutputArchive&) const and
  // void load(torch::serialize::InputArchive&), as LibTorch's classes have them. Kept as JSON: numbers,
  // booleans, text and lists of them; throws for tensors, and for archives within the archive.
  template <typename T>
  static RunExtra of(T& object) {
    return of_archive([&object](torch::serialize::OutputArchive& to) { object.save(to); },
                      [&object](torch::serialize::InputArchive& from) { object.load(from); });
  }
  static RunExtra of_archive(std::function<void(torch::serialize::OutputArchive&)> save,
                             std::function<void(torch::serialize::InputArchive&)> load);
};

}  // namespace zeropage
