# zeropage_carry_headers(<target> <header>): makes an object library whose precompiled header other targets reuse. It has one empty source,
# as a target must have one.
function(zeropage_carry_headers target header)
  add_library(${target} OBJECT EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/cmake/carries_precompiled.cpp)
  target_link_libraries(${target} PRIVATE zeropage::zeropage zeropage_warnings)
  target_precompile_headers(${target} PRIVATE ${header})
endfunction()

# What programs that include torch/torch.h are compiled with: without, g++ takes 10 to 13 s for it in each source.
zeropage_carry_headers(zeropage_program_headers cmake/precompiled_for_programs.h)
