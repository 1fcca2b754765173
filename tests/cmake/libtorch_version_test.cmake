# Which releases of LibTorch cmake/libtorch_version.cmake takes: cmake -DFOLDER=<scratch> -P libtorch_version_test.cmake
set(source ${CMAKE_CURRENT_LIST_DIR}/../../cmake/libtorch_version.cmake)

# expect(<version line of torch/version.py> BUILT_WITH <release or ""> SAYS <regex>): it is taken, and says so. REFUSED: it is
# not. SAYS "^$": nothing.
function(expect version_line)
  cmake_parse_arguments(arg "REFUSED" "BUILT_WITH;SAYS" "" ${ARGN})
  file(WRITE ${FOLDER}/torch/version.py "${version_line}\n")
  execute_process(
    COMMAND ${CMAKE_COMMAND} -DZEROPAGE_TORCH_DIR=${FOLDER}/torch -DZEROPAGE_BUILT_WITH_TORCH=${arg_BUILT_WITH} -P ${source}
    RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX REPLACE "[ \n]+" " " output "${output}")
  if((failed AND NOT arg_REFUSED) OR (arg_REFUSED AND NOT failed) OR NOT output MATCHES "${arg_SAYS}")
    message(SEND_ERROR "${version_line} for '${arg_BUILT_WITH}': expected REFUSED ${arg_REFUSED}, \"${arg_SAYS}\"; "
                       "got ${failed}, \"${output}\"")
  endif()
endfunction()

expect("__version__ = '2.11.0+cu130'" SAYS "^$")
expect("__version__ = '2.11.0'" SAYS "^$")
expect("__version__ = '2.8.1+cpu'" REFUSED SAYS "expected LibTorch 2[.]9[.]0 or newer, got 2[.]8[.]1 in .*Install a newer torch")
expect("__version__ = '99.1.0'" SAYS "LibTorch 99[.]1[.]0 is not among those .*check_libtorch[.]sh 99[.]1[.]0 runs them")
expect("__version__ = '99.1.0.dev20991231+cpu'" SAYS "LibTorch 99[.]1[.]0[.]dev20991231 is not among")
expect("__version__ = None" REFUSED SAYS "expected a line __version__ = '<version>'")
# An installation takes what it was built with, for whatever CUDA, and nothing else.
expect("__version__ = '2.11.0+cpu'" BUILT_WITH 2.11.0 SAYS "^$")
expect("__version__ = '2.11.1'" BUILT_WITH 2.11.0 REFUSED
       SAYS "built with LibTorch 2[.]11[.]0, .* got 2[.]11[.]1 in .*Install torch==2[.]11[.]0")
