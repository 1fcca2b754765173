# Makes the imported target zeropage::torch from the LibTorch that a Python wheel carries.
# find_package(Torch) is not used: it insists on a whole CUDA toolkit even for CPU code.
#
# ZEROPAGE_TORCH_DIR names the folder of the torch package. Unset, it is looked for in the project's
# .venv, then in the python3 on PATH (found, not imported: a slim wheel cannot be imported).
#
# With ZEROPAGE_CUDA it is the whole wheel's: torch_cuda, c10_cuda and the nvidia-* wheels beside it, or elsewhere on
# python3's path. What those lack comes from the CUDA toolkit: cudart, nccl.h.
if(TARGET zeropage::torch)
  return()
endif()

if(NOT ZEROPAGE_TORCH_DIR)
  file(GLOB candidates ${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch
                       ${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch)
  if(NOT candidates)
    execute_process(
      COMMAND python3 -c
              "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
      OUTPUT_VARIABLE candidates OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  list(POP_FRONT candidates first)
  set(ZEROPAGE_TORCH_DIR "${first}" CACHE PATH "Folder of the torch Python package" FORCE)
endif()

if(NOT EXISTS "${ZEROPAGE_TORCH_DIR}/lib/libtorch_cpu.so")
  message(FATAL_ERROR "Zeropage: no LibTorch in '${ZEROPAGE_TORCH_DIR}'. "
                      "Call `make setup`, or pass -DZEROPAGE_TORCH_DIR=<site-packages>/torch")
endif()

include(${CMAKE_CURRENT_LIST_DIR}/libtorch_version.cmake)

function(zeropage_import_torch)
  foreach(library IN LISTS ARGN)
    add_library(zeropage::${library} SHARED IMPORTED)
    set_target_properties(zeropage::${library} PROPERTIES
      IMPORTED_LOCATION "${ZEROPAGE_TORCH_DIR}/lib/lib${library}.so"
      IMPORTED_NO_SONAME TRUE)
  endforeach()
endfunction()
zeropage_import_torch(c10 torch_cpu)

# OpenMP's runtime must be the one that LibTorch has loaded, or there would be two pools of threads.
file(GLOB openmp_runtimes "${ZEROPAGE_TORCH_DIR}/lib/libgomp*.so*")
list(POP_FRONT openmp_runtimes openmp_runtime)
if(NOT openmp_runtime)
  message(FATAL_ERROR "Zeropage: LibTorch's OpenMP runtime, libgomp, is not in ${ZEROPAGE_TORCH_DIR}/lib. "
                      "Install torch==${ZEROPAGE_TORCH_VERSION} from PyPI")
endif()

add_library(zeropage::torch INTERFACE IMPORTED)
set_target_properties(zeropage::torch PROPERTIES
  INTERFACE_INCLUDE_DIRECTORIES
    "${ZEROPAGE_TORCH_DIR}/include;${ZEROPAGE_TORCH_DIR}/include/torch/csrc/api/include"
  INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO"
  INTERFACE_LINK_LIBRARIES "zeropage::torch_cpu;zeropage::c10;${openmp_runtime};Threads::Threads")
find_package(Threads REQUIRED)

if(ZEROPAGE_CUDA)
  if(ZEROPAGE_TORCH_VERSION VERSION_LESS 2.10)
    message(FATAL_ERROR "Zeropage: ZEROPAGE_CUDA needs LibTorch 2.10 or newer (base/libtorch_release.h), and "
                        "${ZEROPAGE_TORCH_DIR} has ${ZEROPAGE_TORCH_VERSION}. Install a newer torch")
  endif()
  file(STRINGS "${ZEROPAGE_TORCH_DIR}/version.py" cuda_line REGEX "^cuda[: ]")
  if(NOT cuda_line MATCHES "'13[.]")
    message(FATAL_ERROR "Zeropage: ZEROPAGE_CUDA needs a LibTorch for CUDA 13, and ${ZEROPAGE_TORCH_VERSION} in "
                        "${ZEROPAGE_TORCH_DIR} says ${cuda_line}. Install torch 2.11.0 or newer from PyPI, or a variant for CUDA 13")
  endif()
  # The toolkit's headers for LibTorch's own; its libraries at run time are those of the nvidia-* wheels, as LibTorch's are.
  find_package(CUDAToolkit 13 REQUIRED)
  get_filename_component(site_packages "${ZEROPAGE_TORCH_DIR}" DIRECTORY)  # or dist-packages
  set(nvidia_folders ${site_packages}/nvidia)
  if(NOT IS_DIRECTORY ${site_packages}/nvidia)
    execute_process(
      COMMAND python3 -c
              "import importlib.util as u; s = u.find_spec('nvidia'); print(';'.join(s.submodule_search_locations if s else []))"
      OUTPUT_VARIABLE nvidia_folders OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  list(TRANSFORM nvidia_folders APPEND "/*/lib" OUTPUT_VARIABLE nvidia_library_globs)
  file(GLOB zeropage_nvidia_libraries ${nvidia_library_globs})
  list(TRANSFORM nvidia_folders APPEND "/nccl/include" OUTPUT_VARIABLE nccl_includes)
  # First where NCCL's own wheel has it, which is of the version that libtorch_cuda.so loads.
  find_path(ZEROPAGE_NCCL_INCLUDE nccl.h HINTS ${nccl_includes} ${CUDAToolkit_INCLUDE_DIRS} PATHS ${ZEROPAGE_BUNDLE}/include)
  find_library(ZEROPAGE_CUDART NAMES libcudart.so.13 HINTS ${zeropage_nvidia_libraries}
               PATHS ${CUDAToolkit_LIBRARY_DIR} /usr/local/cuda/lib64)
  if(NOT EXISTS "${ZEROPAGE_TORCH_DIR}/lib/libtorch_cuda.so")
    message(FATAL_ERROR "Zeropage: ZEROPAGE_CUDA needs a LibTorch with CUDA, and ${ZEROPAGE_TORCH_DIR}/lib has no "
                        "libtorch_cuda.so. Install torch==${ZEROPAGE_TORCH_VERSION} from PyPI, not its CPU variant")
  endif()
  if(NOT ZEROPAGE_NCCL_INCLUDE)
    message(FATAL_ERROR "Zeropage: ZEROPAGE_CUDA needs NCCL's header nccl.h, and none is in an nvidia-nccl wheel "
                        "(${nccl_includes}), the CUDA toolkit (${CUDAToolkit_INCLUDE_DIRS}), /usr/include or bundle/include. Call `scripts/setup.sh --cuda`, install "
                        "nvidia-nccl-cu13 or libnccl-dev, or pass -DZEROPAGE_NCCL_INCLUDE=<folder>")
  endif()
  if(NOT ZEROPAGE_CUDART)
    message(FATAL_ERROR "Zeropage: ZEROPAGE_CUDA needs libcudart.so.13, and none is in an nvidia wheel "
                        "(${nvidia_library_globs}) or the CUDA toolkit (${CUDAToolkit_LIBRARY_DIR}). Call `scripts/setup.sh --cuda`, or install "
                        "torch==${ZEROPAGE_TORCH_VERSION} with all it requires")
  endif()
  message(STATUS "Zeropage: CUDA ${CUDAToolkit_VERSION}, cudart ${ZEROPAGE_CUDART}, nccl.h in ${ZEROPAGE_NCCL_INCLUDE}")
  zeropage_import_torch(c10_cuda torch_cuda)
  set(ZEROPAGE_CUDA_INCLUDES ${CUDAToolkit_INCLUDE_DIRS} ${ZEROPAGE_NCCL_INCLUDE})
  # The compiler has it already, and naming it again breaks #include_next.
  list(REMOVE_ITEM ZEROPAGE_CUDA_INCLUDES /usr/include)
  # Nothing of ours names a symbol of torch_cuda where it registers its operators, so the linker must not drop it.
  set(link_cuda -Wl,--no-as-needed zeropage::torch_cuda zeropage::c10_cuda ${ZEROPAGE_CUDART} -Wl,--as-needed)
  foreach(folder IN LISTS zeropage_nvidia_libraries)
    list(APPEND link_cuda -Wl,-rpath-link,${folder})
    if(NOT ZEROPAGE_RUN_PATH)
      list(APPEND link_cuda -Wl,-rpath,${folder})
    endif()
  endforeach()
  # For what torch_cuda needs and no wheel brought.
  list(APPEND link_cuda -Wl,-rpath-link,${CUDAToolkit_LIBRARY_DIR})
  set_property(TARGET zeropage::torch APPEND PROPERTY INTERFACE_LINK_LIBRARIES "${link_cuda}")
endif()
