#include <utility>

#include "zeropage/check.h"
#include "zeropage/world.h"

namespace zeropage::comm {
namespace {

std::string message_of_rank(size_t rank, const std::vector<std::exception_ptr>& errors) {
  const std::string prefix = c10::str("[rank ", rank, "/", errors.size(), "] ");
  try {
    std::rethrow_exception(errors[rank]);
  } catch (const std::exception& error) {
    const std::string message = memory::message_of(error);
    return message.starts_with(prefix) ? message : prefix + message;
  } catch (...) {
    return prefix + "an exception that is no std::exception";
  }
}

}  // namespace

RanksFailed::RanksFailed(int rank, std::vector<std::exception_ptr> errors)
    : std::runtime_error(message_of_rank(static_cast<size_t>(rank), errors)),
      rank_(rank),
      errors_(std::move(errors)) {}

}  // namespace zeropage::comm
