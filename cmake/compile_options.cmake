set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
# The library's precompiled header serves executables too only if both are compiled alike.
set(CMAKE_CXX_COMPILE_OPTIONS_PIE "-fPIC")

# Messages name sources from the project's folder on, and the compiler's cache serves every clone.
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=>)

# g++ looks for garbage again and again where a precompiled header has filled its heap. With a GiB to fill first it takes up to a tenth
# less time, and a tenth more memory.
add_compile_options($<$<COMPILE_LANG_AND_ID:CXX,GNU>:--param=ggc-min-heapsize=1048576>)

find_program(ZEROPAGE_CCACHE ccache)
if(ZEROPAGE_CCACHE AND PROJECT_IS_TOP_LEVEL)
  # A precompiled header is cached only under these sloppiness flags; the base folder makes clones share hits.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${ZEROPAGE_CCACHE})
  add_compile_options($<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>)
endif()

if(ZEROPAGE_SANITIZER)
  add_compile_options(-fsanitize=${ZEROPAGE_SANITIZER} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${ZEROPAGE_SANITIZER})
  if(ZEROPAGE_SANITIZER STREQUAL "address")
    add_compile_options(-fsanitize=undefined -fno-sanitize-recover=undefined)
    add_link_options(-fsanitize=undefined)
  endif()
endif()

# Our own targets link this privately: warnings are ours to mend, never a user's or a dependency's.
add_library(zeropage_warnings INTERFACE)
# Designated initializers leave the rest at their defaults on purpose.
target_compile_options(zeropage_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;$<$<BOOL:${ZEROPAGE_WERROR}>:-Werror>;-Wno-missing-field-initializers>)
if(CMAKE_UNITY_BUILD)
  # g++ takes the anonymous namespace of a source for that of a header where several sources are compiled as one.
  target_compile_options(zeropage_warnings INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
endif()
if(ZEROPAGE_SANITIZER)
  # g++ takes LibTorch's defaulted optional arguments for uninitialised once they are instrumented.
  target_compile_options(zeropage_warnings INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-maybe-uninitialized>)
endif()

# zeropage_intra_op_parallel(<target> <sources>...): at::parallel_for in these sources uses LibTorch's threads. It is a
# template that without -fopenmp runs serially; files with flags of their own cannot take the precompiled header. Under
# ThreadSanitizer it stays serial: the OpenMP runtime is not instrumented. With clang too: its OpenMP needs a runtime of its own, and
# LibTorch brings GNU's.
function(zeropage_intra_op_parallel target)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT ZEROPAGE_SANITIZER STREQUAL "thread")
    set_source_files_properties(${ARGN} TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS "-fopenmp"
                                SKIP_PRECOMPILE_HEADERS ON)
  endif()
endfunction()

# zeropage_without_cuda(<target> <sources>...): sources of a build without CUDA. Each is compiled by itself, so that the unity
# sources are those of a build with CUDA and the compiler's cache serves both. They include little of LibTorch.
function(zeropage_without_cuda target)
  if(NOT ZEROPAGE_CUDA)
    target_sources(${target} PRIVATE ${ARGN})
    set_source_files_properties(${ARGN} TARGET_DIRECTORY ${target} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON
                                SKIP_PRECOMPILE_HEADERS ON)
  endif()
endfunction()

if(ZEROPAGE_CUDA)
  include(cuda_language)
endif()
