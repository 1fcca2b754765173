# zeropage_carry_headers(<target> <header>): makes an object library whose precompiled header other targets reuse. It has one empty source,
# as a target must have one. It takes the header too, which costs g++ 6 s: where no source takes it, CMake makes no rule for it.
function(zeropage_carry_headers target header)
  add_library(${target} OBJECT EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/cmake/carries_precompiled.cpp)
  target_link_libraries(${target} PRIVATE zeropage::zeropage zeropage_inside zeropage_warnings)
  target_precompile_headers(${target} PRIVATE ${header})
endfunction()

# What programs that include torch/torch.h are compiled with: without, g++ takes 10 to 13 s for it in each source.
zeropage_carry_headers(zeropage_program_headers cmake/precompiled_for_programs.h)

# zeropage_compile_as_program(<target>): LibTorch and the library compute. What a program has of its own gains nothing from -O3, which
# takes g++ half as long again as -O1.
function(zeropage_compile_as_program target)
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
  target_precompile_headers(${target} REUSE_FROM zeropage_program_headers)
endfunction()
