include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Zeropage)
install(TARGETS zeropage EXPORT ZeropageTargets)
install(FILES ${zeropage__uring_library} DESTINATION ${CMAKE_INSTALL_LIBDIR} RENAME libzeropage_uring.a)
target_link_libraries(zeropage PRIVATE
                      $<INSTALL_INTERFACE:$<INSTALL_PREFIX>/${CMAKE_INSTALL_LIBDIR}/libzeropage_uring.a>)
install(EXPORT ZeropageTargets NAMESPACE zeropage:: DESTINATION ${package_dir})
install(DIRECTORY memory device operators paging comm accumulate checkpointing offload state zero DESTINATION include/zeropage
        FILES_MATCHING PATTERN "*.h" PATTERN "detail" EXCLUDE)
configure_package_config_file(cmake/ZeropageConfig.cmake.in ${PROJECT_BINARY_DIR}/ZeropageConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/ZeropageConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/ZeropageConfig.cmake ${PROJECT_BINARY_DIR}/ZeropageConfigVersion.cmake
              cmake/find_libtorch.cmake cmake/find_host_libraries.cmake DESTINATION ${package_dir})
if(ZEROPAGE_EXAMPLES)
  # Where hwloc comes from a bundle.
  set_target_properties(zp PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
  install(TARGETS zp)
endif()
