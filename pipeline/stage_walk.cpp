#include "pipeline/stage_walk.h"

#include <chrono>
#include <exception>

#include <ATen/ATen.h>

#include "comm/failure.h"
#include "zeropage/check.h"

namespace zeropage::pipeline {
namespace {

using parallel::Action;

// The rank has no words of its own for it.
struct OtherStageFailed {};

// Without what error messages of this rank begin with.
std::string words_of(const std::exception& error) {
  const std::string message = memory::message_of(error), prefix = memory::owner_prefix();
  return message.starts_with(prefix) ? message.substr(prefix.size()) : message;
}

}  // namespace

StageWalk::StageWalk(const comm::World& ranks, const comm::World& all_ranks,
                     const parallel::ActionLists& lists)
    : ranks_(ranks), all_ranks_(all_ranks), lists_(lists), messages_(ranks, lists.chunks) {}

double StageWalk::now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

at::Tensor StageWalk::received(const Action& action) {
  const auto message = received_by(lists_, ranks_.rank(), action);
  at::Tensor tensor = messages_.receive(*message);
  last_received_ = message;
  if (!tensor.defined()) throw OtherStageFailed();
  begun_s_ = now_s();
  return tensor;
}

bool StageWalk::sends(const Action& action) const {
  return sent_by(lists_, ranks_.rank(), action).has_value();
}

void StageWalk::send(const Action& action, const at::Tensor& tensor) {
  const auto message = sent_by(lists_, ranks_.rank(), action);
  messages_.send(*message, tensor);
  last_sent_ = message;
}

void StageWalk::receive_ahead_of(const Action& action) {
  if (const auto message = received_by(lists_, ranks_.rank(), action)) {
    messages_.receive_ahead(*message);
  }
}

void StageWalk::run(const Pass& pass) {
  is_broken_ = true;
  last_received_.reset();
  last_sent_.reset();
  size_t index = 0;
  bool has_failed = false;
  std::string own;  // words of this rank's error
  std::exception_ptr error;
  try {
    pass.begin();
    try {
      for (; index < pass.actions.size(); ++index) {
        begun_s_ = now_s();
        pass.perform(pass.actions[index]);
      }
    } catch (const std::exception& failed) {
      ZP_THROW(at_action(pass, index), ": ", words_of(failed));
    }
  } catch (const OtherStageFailed&) {
    has_failed = true;
  } catch (const std::exception& failed) {
    has_failed = true;
    own = words_of(failed);
    error = std::current_exception();
  }
  if (has_failed && all_ranks_.size() > ranks_.size()) {
    comm::fail(all_ranks_, own);
    ZP_THROW(own,
             ". All ranks of the mesh end, and cannot go on: restart from the last saved state");
  }
  std::vector<std::string> by_rank;
  try {
    if (has_failed) pass_by(pass, index);
    messages_.end_step();
    by_rank = told(own);
  } catch (const std::exception&) {
    // The first error says more.
    if (error) std::rethrow_exception(error);
    throw;
  }
  is_broken_ = false;
  if (!by_rank.empty()) fail(pass, index, own, by_rank);
}

std::string StageWalk::at_action(const Pass& pass, size_t index) const {
  const Action& action = pass.actions[index];
  return c10::str("stage ", lists_.stage(ranks_.rank(), action.chunk), " of ", lists_.stages(),
                  ", ", describe(action, lists_.chunks));
}

void StageWalk::pass_by(const Pass& pass, size_t from) {
  for (size_t index = from; index < pass.actions.size(); ++index) {
    const auto received = received_by(lists_, ranks_.rank(), pass.actions[index]);
    if (received && received != last_received_) messages_.discard(*received);
    const auto sent = sent_by(lists_, ranks_.rank(), pass.actions[index]);
    if (sent && sent != last_sent_) messages_.send_nothing(*sent);
  }
}

// What each rank failed with, "" where it did not; nothing at all where none did.
std::vector<std::string> StageWalk::told(const std::string& own) const {
  if (ranks_.size() == 1) return own.empty() ? std::vector<std::string>() : std::vector{own};
  comm::Communicator& communicator = ranks_.communicator();
  const at::Tensor any = at::full(
      {1}, own.empty() ? 0 : 1, at::TensorOptions().dtype(at::kByte).device(communicator.device()));
  communicator.all_reduce(any, comm::ReduceOp::kMax, "whether a stage of the pipeline has failed")
      .wait();
  if (any.is_meta() || any.item<uint8_t>() == 0) return {};
  return ranks_.gather_text("why a stage of the pipeline has failed", own);
}

// A rank that has words of its own says these first.
void StageWalk::fail(const Pass& pass, size_t index, const std::string& own,
                     const std::vector<std::string>& by_rank) const {
  std::string words = own;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (by_rank[rank].empty() || static_cast<int>(rank) == ranks_.rank()) continue;
    if (words.empty()) {
      words = index < pass.actions.size() ? at_action(pass, index) + ": it has ended, as"
                                          : std::string("a pass of the pipeline: it has ended, as");
    } else {
      words += "; and";
    }
    words += c10::str(" rank ", ranks_.global_rank(static_cast<int>(rank)), " failed in ",
                      by_rank[rank]);
  }
  ZP_THROW(words, ". ", pass.advice);
}

}  // namespace zeropage::pipeline
