include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Zeropage)
install(TARGETS zeropage EXPORT ZeropageTargets)
foreach(library IN ITEMS zeropage_data zeropage_text)
  if(TARGET ${library})
    install(TARGETS ${library} EXPORT ZeropageTargets)
  endif()
endforeach()
install(FILES ${zeropage__uring_library} DESTINATION ${CMAKE_INSTALL_LIBDIR} RENAME libzeropage_uring.a)
target_link_libraries(zeropage PRIVATE
                      $<INSTALL_INTERFACE:$<INSTALL_PREFIX>/${CMAKE_INSTALL_LIBDIR}/libzeropage_uring.a>)
install(EXPORT ZeropageTargets NAMESPACE zeropage:: DESTINATION ${package_dir})
install(DIRECTORY include/zeropage DESTINATION include FILES_MATCHING PATTERN "*.h")
configure_package_config_file(cmake/ZeropageConfig.cmake.in ${PROJECT_BINARY_DIR}/ZeropageConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/ZeropageConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/ZeropageConfig.cmake ${PROJECT_BINARY_DIR}/ZeropageConfigVersion.cmake
              cmake/find_libtorch.cmake cmake/libtorch_version.cmake cmake/find_host_libraries.cmake DESTINATION ${package_dir})
if(ZEROPAGE_EXAMPLES)
  # Where LibTorch, oneTBB and what came from a bundle are. INSTALL_RPATH_USE_LINK_PATH would leave out folders within the project, such
  # as .venv.
  if(NOT ZEROPAGE_RUN_PATH)
    set(library_folders ${ZEROPAGE_TORCH_DIR}/lib)
    foreach(library IN LISTS ZEROPAGE_TBB_LIBRARY ZEROPAGE_HWLOC_LIBRARY)
      get_filename_component(folder "${library}" DIRECTORY)
      list(APPEND library_folders ${folder})
    endforeach()
    list(REMOVE_DUPLICATES library_folders)
    set_target_properties(zp zp-plan PROPERTIES INSTALL_RPATH "${library_folders}")
  endif()
  install(TARGETS zp zp-plan)
endif()
