#include "comm/uncaught_error.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "zeropage/check.h"

namespace zeropage::comm::detail {
namespace {

[[noreturn]] void say_and_abort() {
  std::string words = "ended without an exception";
  if (std::current_exception()) {
    try {
      throw;
    } catch (const std::exception& error) {
      words = memory::message_of(error);
    } catch (...) {
      words = "an exception that is no std::exception";
    }
  }
  std::fprintf(stderr, "zeropage: nothing caught: %s\n", words.c_str());
  std::abort();
}

}  // namespace

void say_uncaught_errors_shortly() {
  if (std::getenv("TORCH_SHOW_CPP_STACKTRACES") != nullptr) return;
  if (std::get_terminate() == &__gnu_cxx::__verbose_terminate_handler) {
    std::set_terminate(&say_and_abort);
  }
}

}  // namespace zeropage::comm::detail
