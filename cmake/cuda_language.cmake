# nvcc for our kernels. `.cu` files see no LibTorch header.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80 90)  # A100, H100 and H200
endif()
find_program(ZEROPAGE_NVCC nvcc PATHS /usr/local/cuda/bin)
if(NOT ZEROPAGE_NVCC)
  message(FATAL_ERROR "Zeropage: no nvcc on PATH or in /usr/local/cuda/bin. Install the CUDA 13.0 toolkit, "
                      "or build the CPU runtime: cmake --preset release")
endif()
set(CMAKE_CUDA_COMPILER ${ZEROPAGE_NVCC})
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
# CMake's default is the static one: a second runtime beside LibTorch's, with streams and errors of its own.
set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
if(ZEROPAGE_CCACHE AND PROJECT_IS_TOP_LEVEL)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
endif()
enable_language(CUDA)
# Every program that links us has all kernels: a third of their size.
add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
# CMake 3.25 does not know that nvcc 13 has it.
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
