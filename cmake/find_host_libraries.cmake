# Makes the imported targets zeropage::hwloc and zeropage::tbb: the machine's topology, and threads for the optimizer.
#
# oneTBB is looked for where setup puts it, in the virtual environment that LibTorch is in; then where its wheels go
# beside another torch, in ZEROPAGE_BUNDLE, and in the system. ZEROPAGE_TBB_INCLUDE and ZEROPAGE_TBB_LIBRARY name others.
if(TARGET zeropage::tbb)
  return()
endif()

foreach(found IN ITEMS TBB_INCLUDE TBB_LIBRARY HWLOC_INCLUDE HWLOC_LIBRARY)
  # A bundle that was removed since the last configuration.
  if(DEFINED CACHE{ZEROPAGE_${found}} AND NOT EXISTS "${ZEROPAGE_${found}}")
    unset(ZEROPAGE_${found} CACHE)
  endif()
endforeach()

# <environment>/lib/python3.x/site-packages/torch
get_filename_component(environment "${ZEROPAGE_TORCH_DIR}/../../../.." REALPATH)
find_path(ZEROPAGE_TBB_INCLUDE oneapi/tbb/task_arena.h
          HINTS ${CMAKE_SOURCE_DIR}/.venv/include ${environment}/include PATHS ${ZEROPAGE_BUNDLE}/include)
find_library(ZEROPAGE_TBB_LIBRARY NAMES libtbb.so.12 tbb
             HINTS ${CMAKE_SOURCE_DIR}/.venv/lib ${environment}/lib PATHS ${ZEROPAGE_BUNDLE}/lib)
find_path(ZEROPAGE_HWLOC_INCLUDE hwloc.h PATHS ${ZEROPAGE_BUNDLE}/include)
find_library(ZEROPAGE_HWLOC_LIBRARY NAMES hwloc libhwloc.so.15 PATHS ${ZEROPAGE_BUNDLE}/lib)

function(zeropage_import_host_library name remedy)
  string(TOUPPER ${name} key)
  if(NOT ZEROPAGE_${key}_INCLUDE OR NOT ZEROPAGE_${key}_LIBRARY)
    message(FATAL_ERROR "Zeropage: ${name} is missing (headers: ${ZEROPAGE_${key}_INCLUDE}, library: "
                        "${ZEROPAGE_${key}_LIBRARY}). Call `make setup`, bring a bundle/ (`make bundle`), or install ${remedy}")
  endif()
  add_library(zeropage::${name} INTERFACE IMPORTED GLOBAL)
  # The compiler has /usr/include already, and naming it again breaks #include_next.
  if(NOT ZEROPAGE_${key}_INCLUDE STREQUAL "/usr/include")
    target_include_directories(zeropage::${name} INTERFACE ${ZEROPAGE_${key}_INCLUDE})
  endif()
  target_link_libraries(zeropage::${name} INTERFACE ${ZEROPAGE_${key}_LIBRARY})
endfunction()
zeropage_import_host_library(hwloc libhwloc-dev)
zeropage_import_host_library(tbb "the wheels tbb-devel and tbb, or libtbb-dev")
