#include "comm/watch/detached_thread.h"

#include <memory>
#include <pthread.h>
#include <system_error>
#include <utility>

namespace zeropage::comm::detail {
namespace {

void* run_body(void* given) noexcept {
  const std::unique_ptr<std::function<void()>> body(static_cast<std::function<void()>*>(given));
  (*body)();
  return nullptr;
}

}  // namespace

void start_detached(std::function<void()> body) {
  auto given = std::make_unique<std::function<void()>>(std::move(body));
  pthread_attr_t attributes;
  ::pthread_attr_init(&attributes);
  ::pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_t thread{};
  const int error = ::pthread_create(&thread, &attributes, run_body, given.get());
  ::pthread_attr_destroy(&attributes);
  if (error != 0) throw std::system_error(error, std::generic_category(), "starting a thread");
  static_cast<void>(given.release());  // the thread's
}

}  // namespace zeropage::comm::detail
