// Takes the place of CUDA's driver, libcuda.so.1: it has no function, so CUDA does not start, but it
// writes the process and its parent to the file $ZEROPAGE_DRIVER_LOG when it is loaded.
#include <cstdio>
#include <cstdlib>
#include <unistd.h>

namespace {

__attribute__((constructor)) void note_load() {
  const char* const path = std::getenv("ZEROPAGE_DRIVER_LOG");
  if (path == nullptr) return;
  if (FILE* const log = std::fopen(path, "a")) {
    std::fprintf(log, "%d %d\n", static_cast<int>(getpid()), static_cast<int>(getppid()));
    std::fclose(log);
  }
}

}  // namespace
