# Makes the imported target zeropage::torch from the LibTorch that a Python wheel carries.
# find_package(Torch) is not used: it insists on a whole CUDA toolkit even for CPU code.
#
# ZEROPAGE_TORCH_DIR names the folder of the torch package. Unset, it is looked for in the project's
# .venv, then in the python3 on PATH (found, not imported: a slim wheel cannot be imported).
#
# With ZEROPAGE_CUDA it is the whole wheel's: torch_cuda, c10_cuda and the nvidia-* wheels beside it.
if(TARGET zeropage::torch)
  return()
endif()

set(zeropage_torch_version 2.11.0)

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

file(STRINGS "${ZEROPAGE_TORCH_DIR}/version.py" version_line REGEX "^__version__")
if(NOT version_line MATCHES "'${zeropage_torch_version}([+][^']*)?'")
  message(FATAL_ERROR "Zeropage: LibTorch ${zeropage_torch_version} is needed, found ${version_line} "
                      "in ${ZEROPAGE_TORCH_DIR}. Install torch==${zeropage_torch_version}")
endif()

foreach(library c10 torch_cpu)
  add_library(zeropage::${library} SHARED IMPORTED)
  set_target_properties(zeropage::${library} PROPERTIES
    IMPORTED_LOCATION "${ZEROPAGE_TORCH_DIR}/lib/lib${library}.so"
    IMPORTED_NO_SONAME TRUE)
endforeach()

add_library(zeropage::torch INTERFACE IMPORTED)
set_target_properties(zeropage::torch PROPERTIES
  INTERFACE_INCLUDE_DIRECTORIES
    "${ZEROPAGE_TORCH_DIR}/include;${ZEROPAGE_TORCH_DIR}/include/torch/csrc/api/include"
  INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO"
  INTERFACE_LINK_LIBRARIES "zeropage::torch_cpu;zeropage::c10;Threads::Threads")
find_package(Threads REQUIRED)

if(ZEROPAGE_CUDA)
  # The toolkit's headers for LibTorch's own; its libraries at run time are those of the nvidia-* wheels, as LibTorch's are.
  find_package(CUDAToolkit 13 REQUIRED)
  get_filename_component(zeropage_site_packages "${ZEROPAGE_TORCH_DIR}" DIRECTORY)
  file(GLOB zeropage_nvidia_libraries ${zeropage_site_packages}/nvidia/*/lib)
  find_path(ZEROPAGE_NCCL_INCLUDE nccl.h HINTS ${zeropage_site_packages}/nvidia/nccl/include ${CUDAToolkit_INCLUDE_DIRS})
  find_library(ZEROPAGE_CUDART NAMES libcudart.so.13 HINTS ${zeropage_nvidia_libraries} ${CUDAToolkit_LIBRARY_DIR})
  foreach(needed IN ITEMS "${ZEROPAGE_TORCH_DIR}/lib/libtorch_cuda.so" "${ZEROPAGE_NCCL_INCLUDE}/nccl.h" "${ZEROPAGE_CUDART}")
    if(NOT EXISTS "${needed}")
      message(FATAL_ERROR "Zeropage: ZEROPAGE_CUDA needs '${needed}', which is not there. "
                          "Call `scripts/setup.sh --cuda`, or install torch==${zeropage_torch_version} with all it requires")
    endif()
  endforeach()
  foreach(library c10_cuda torch_cuda)
    add_library(zeropage::${library} SHARED IMPORTED)
    set_target_properties(zeropage::${library} PROPERTIES
      IMPORTED_LOCATION "${ZEROPAGE_TORCH_DIR}/lib/lib${library}.so"
      IMPORTED_NO_SONAME TRUE)
  endforeach()
  set(ZEROPAGE_CUDA_INCLUDES ${CUDAToolkit_INCLUDE_DIRS} ${ZEROPAGE_NCCL_INCLUDE})
  # Nothing of ours names a symbol of torch_cuda where it registers its operators, so the linker must not drop it.
  set(link_cuda -Wl,--no-as-needed zeropage::torch_cuda zeropage::c10_cuda ${ZEROPAGE_CUDART} -Wl,--as-needed)
  foreach(folder IN LISTS zeropage_nvidia_libraries)
    list(APPEND link_cuda -Wl,-rpath,${folder} -Wl,-rpath-link,${folder})
  endforeach()
  set_property(TARGET zeropage::torch APPEND PROPERTY INTERFACE_LINK_LIBRARIES "${link_cuda}")
endif()
