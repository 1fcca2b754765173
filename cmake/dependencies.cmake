# LibTorch comes from .venv; the rest from the system, or, where it lacks them, from bundle/ (`make bundle`).
set(ZEROPAGE_BUNDLE "${PROJECT_SOURCE_DIR}/bundle" CACHE PATH "Folder made by `make bundle`")
include(find_libtorch)
include(find_host_libraries)

# zeropage_import(<target> HEADER <file> [LIBRARY <name>] [OPTIONAL]): an imported target. OPTIONAL: none, and a line
# that says so, where the header is missing.
function(zeropage_import target)
  cmake_parse_arguments(arg "OPTIONAL" "HEADER;LIBRARY" "" ${ARGN})
  string(MAKE_C_IDENTIFIER "${target}" key)
  foreach(found IN ITEMS ${key}_include ${key}_library)
    # A bundle that was removed since the last configuration.
    if(DEFINED CACHE{${found}} AND NOT EXISTS "${${found}}")
      unset(${found} CACHE)
    endif()
  endforeach()
  find_path(${key}_include ${arg_HEADER} PATHS ${ZEROPAGE_BUNDLE}/include)
  if(NOT ${key}_include AND arg_OPTIONAL)
    message(STATUS "Zeropage: ${arg_HEADER} is missing; what needs ${target} is not built")
    return()
  endif()
  if(NOT ${key}_include)
    message(FATAL_ERROR "Zeropage: ${arg_HEADER} is missing. Call `make setup`, or bring a bundle/ (`make bundle`)")
  endif()
  if(arg_LIBRARY)
    find_library(${key}_library ${arg_LIBRARY} PATHS ${ZEROPAGE_BUNDLE}/lib REQUIRED)
  endif()
  add_library(${target} INTERFACE IMPORTED GLOBAL)
  # The compiler has /usr/include already, and naming it again breaks #include_next.
  if(NOT ${key}_include STREQUAL "/usr/include")
    target_include_directories(${target} INTERFACE ${${key}_include})
  endif()
  if(arg_LIBRARY)
    target_link_libraries(${target} INTERFACE ${${key}_library})
  endif()
endfunction()

# A static archive, which is installed beside ours: whoever links Zeropage needs no liburing.
zeropage_import(zeropage::uring HEADER liburing.h LIBRARY liburing.a)
zeropage_import(zeropage::xxhash HEADER xxhash.h)
zeropage_import(zeropage::json HEADER nlohmann/json.hpp)

if(ZEROPAGE_BENCH STREQUAL "AUTO" AND PROJECT_IS_TOP_LEVEL)
  zeropage_import(zeropage::benchmark HEADER benchmark/benchmark.h LIBRARY benchmark OPTIONAL)
elseif(NOT ZEROPAGE_BENCH STREQUAL "AUTO" AND ZEROPAGE_BENCH)
  zeropage_import(zeropage::benchmark HEADER benchmark/benchmark.h LIBRARY benchmark)
endif()
if(ZEROPAGE_EXAMPLES OR TARGET zeropage::benchmark)
  zeropage_import(zeropage::cli11 HEADER CLI/CLI.hpp)
endif()
if(ZEROPAGE_EXAMPLES)
  zeropage_import(zeropage::crypto HEADER openssl/evp.h LIBRARY crypto)
endif()
if(ZEROPAGE_TESTS)
  zeropage_import(zeropage::gtest HEADER gtest/gtest.h LIBRARY gtest)
endif()

# zeropage_cuda_sources(<sources>...): sources of the library that see CUDA's headers, of the folder that calls. The others are
# compiled alike with and without CUDA, so that ccache serves both builds.
function(zeropage_cuda_sources)
  target_sources(zeropage PRIVATE ${ARGN})
  set_property(SOURCE ${ARGN} TARGET_DIRECTORY zeropage APPEND PROPERTY INCLUDE_DIRECTORIES ${ZEROPAGE_CUDA_INCLUDES})
endfunction()
