# Sets ZEROPAGE_TORCH_VERSION to the release of LibTorch in ZEROPAGE_TORCH_DIR, and ends where Zeropage cannot be built with it.
#
# An installed Zeropage sets ZEROPAGE_BUILT_WITH_TORCH before: LibTorch keeps no binary interface from release to release, so
# the library and the program must be compiled with the same one.

# Older releases lack headers that are included. There is no upper bound: what Zeropage needs of a newer one is tried at run
# time (memory/self_check.h). The tests passed with those of the second list (scripts/check_libtorch.sh).
set(zeropage_torch_oldest 2.9.0)
set(zeropage_torch_tested 2.11.0)

# Without what follows a plus, which names the CUDA it was built for.
file(STRINGS "${ZEROPAGE_TORCH_DIR}/version.py" version_line REGEX "^__version__")
if(NOT version_line MATCHES "'([0-9][^'+]*)")
  message(FATAL_ERROR "Zeropage: expected a line __version__ = '<version>' in ${ZEROPAGE_TORCH_DIR}/version.py, "
                      "got '${version_line}'. Install torch from PyPI")
endif()
set(ZEROPAGE_TORCH_VERSION ${CMAKE_MATCH_1})
if(ZEROPAGE_TORCH_VERSION VERSION_LESS zeropage_torch_oldest)
  message(FATAL_ERROR "Zeropage: expected LibTorch ${zeropage_torch_oldest} or newer, got ${ZEROPAGE_TORCH_VERSION} "
                      "in ${ZEROPAGE_TORCH_DIR}. Install a newer torch, or name another by -DZEROPAGE_TORCH_DIR=<site-packages>/torch")
endif()
if(ZEROPAGE_BUILT_WITH_TORCH AND NOT ZEROPAGE_TORCH_VERSION STREQUAL ZEROPAGE_BUILT_WITH_TORCH)
  message(FATAL_ERROR "Zeropage: this installation was built with LibTorch ${ZEROPAGE_BUILT_WITH_TORCH}, and a program must be "
                      "compiled with the same one; got ${ZEROPAGE_TORCH_VERSION} in ${ZEROPAGE_TORCH_DIR}. Install "
                      "torch==${ZEROPAGE_BUILT_WITH_TORCH}, name it by -DZEROPAGE_TORCH_DIR=<site-packages>/torch, or build "
                      "Zeropage with ${ZEROPAGE_TORCH_VERSION}")
endif()
list(FIND zeropage_torch_tested ${ZEROPAGE_TORCH_VERSION} place)
if(place EQUAL -1)
  list(JOIN zeropage_torch_tested ", " tested)
  message(STATUS "Zeropage: LibTorch ${ZEROPAGE_TORCH_VERSION} is not among those that the tests were run with (${tested}); "
                 "scripts/check_libtorch.sh ${ZEROPAGE_TORCH_VERSION} runs them")
endif()
