# Behind project() of examples/, where scripts/check_consumer.sh builds that folder: LibTorch's header is parsed once for all programs,
# which takes a third of the time. Nothing of Zeropage is in it, so each program still has to find what it includes.
cmake_language(DEFER CALL zeropage_parse_torch_once)

function(zeropage_parse_torch_once)
  get_property(targets DIRECTORY PROPERTY BUILDSYSTEM_TARGETS)
  # It must not see LibTorch's folder.
  list(REMOVE_ITEM targets zeropage_run_log)
  file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/torch_header.cpp" "")
  add_library(torch_header OBJECT "${CMAKE_CURRENT_BINARY_DIR}/torch_header.cpp")
  target_link_libraries(torch_header PRIVATE zeropage::zeropage)
  target_precompile_headers(torch_header PRIVATE <torch/torch.h>)
  foreach(target IN LISTS targets)
    get_target_property(type ${target} TYPE)
    if(type STREQUAL "EXECUTABLE" OR type STREQUAL "STATIC_LIBRARY")
      target_precompile_headers(${target} REUSE_FROM torch_header)
    endif()
  endforeach()
endfunction()
