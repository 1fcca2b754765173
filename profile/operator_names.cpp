#include "profile/operator_names.h"

#include <memory>

namespace zeropage::profile {
namespace {

struct OfThread {
  int64_t depth = 0;
  const char* outermost = "";
};

thread_local OfThread of_thread;

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& function) {
  if (of_thread.depth++ == 0) of_thread.outermost = function.name();
  return nullptr;
}

void on_end(const at::RecordFunction& /*function*/, at::ObserverContext* /*context*/) {
  if (of_thread.depth > 0 && --of_thread.depth == 0) of_thread.outermost = "";
}

}  // namespace

OperatorNames::OperatorNames()
    : handle_(at::addThreadLocalCallback(
          at::RecordFunctionCallback(&on_begin, &on_end)
              .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}))) {}

OperatorNames::~OperatorNames() {
  at::removeCallback(handle_);
}

std::string_view OperatorNames::outermost() {
  constexpr std::string_view kOfEngine = "autograd::engine::evaluate_function: ";
  std::string_view name = of_thread.outermost;
  if (name.starts_with(kOfEngine)) name.remove_prefix(kOfEngine.size());
  return name;
}

}  // namespace zeropage::profile
