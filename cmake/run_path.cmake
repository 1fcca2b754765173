# Programs that look for shared libraries where ZEROPAGE_RUN_PATH says. So that those of the build folder run in it too, it has links to what
# scripts/carry.sh packs, or scripts/check_gpu.sh links: oneTBB in lib/, and site-packages.
if(NOT ZEROPAGE_RUN_PATH)
  return()
endif()
set(CMAKE_INSTALL_RPATH "${ZEROPAGE_RUN_PATH}")
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
# RPATH, which serves the libraries of libraries too, and not RUNPATH.
add_link_options(-Wl,--disable-new-dtags)

get_filename_component(zeropage_site_packages "${ZEROPAGE_TORCH_DIR}" DIRECTORY)
file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
file(CREATE_LINK ${zeropage_site_packages} ${PROJECT_BINARY_DIR}/site-packages SYMBOLIC)
file(CREATE_LINK ${ZEROPAGE_TBB_LIBRARY} ${PROJECT_BINARY_DIR}/lib/libtbb.so.12 SYMBOLIC)
