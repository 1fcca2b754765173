#!/usr/bin/env bash
# Installs Zeropage and builds outside projects against the install tree alone: the first program of docs/getting_started.md, which then
# runs on one rank and on two, the folder examples/, and every snippet of README.md and docs/.
#
#   scripts/check_consumer.sh --headers    and a source for each public header, which includes nothing else of ours (4 minutes)
set -euo pipefail
cd "$(dirname "$0")/.."

prefix=$PWD/build/install
against_install=(-G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$prefix"
                 -DZEROPAGE_TORCH_DIR="$(echo .venv/lib/python3*/site-packages/torch | xargs realpath)")
rm -rf "$prefix" build/doc_programs
cmake --install build/release --prefix "$prefix" >/dev/null

programs=build/doc_programs
scripts/doc_programs.py "$programs"
cat >"$programs/snippets/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.25)
project(snippets LANGUAGES CXX)
find_package(Zeropage REQUIRED)
file(GLOB sources ${PROJECT_SOURCE_DIR}/*.cpp)
add_library(snippets OBJECT ${sources})
target_include_directories(snippets PRIVATE ${SCRIPTS})
set_target_properties(snippets PROPERTIES UNITY_BUILD ON)
# Options of which a program names some are initialised whole.
target_compile_options(snippets PRIVATE -fsyntax-only -Werror=missing-field-initializers)
target_link_libraries(snippets PRIVATE zeropage::zeropage)
END
# These have few sources, and the examples begin with one, LibTorch's header. So they are built at once.
build_doc_programs() {
  local program
  for program in getting_started snippets; do
    cmake -S "$programs/$program" -B "$programs/$program/build" "${against_install[@]}" -DSCRIPTS="$PWD/scripts" \
      --no-warn-unused-cli >/dev/null
    cmake --build "$programs/$program/build" -j 1
  done
}
build_doc_programs >build/doc_programs.log 2>&1 &
doc_programs=$!

# The examples, as whoever copies their folder builds them; by clang, where it is installed, which takes less time than g++ and sees what g++ lets pass.
rm -rf build/examples_alone
cmake -S examples -B build/examples_alone "${against_install[@]}" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0 \
  -DCMAKE_CXX_COMPILER="$(command -v clang++ || command -v c++)" \
  -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=50 -DCMAKE_PROJECT_INCLUDE="$PWD/scripts/torch_header_once.cmake" >/dev/null
cmake --build build/examples_alone -j "$(nproc)"
wait "$doc_programs" || { cat build/doc_programs.log; exit 1; }

"$programs/getting_started/build/my_trainer"
"$prefix/bin/zp" run -n 2 -- "$programs/getting_started/build/my_trainer"
# Each tool starts, away from the folder that it was built in.
(
  cd /
  "$prefix/bin/zp" --version
  "$prefix/bin/zp" plan --params 125M --ranks 2
  "$prefix/bin/zp" schedule --pipeline 2 --micro-batches 4
  "$prefix/bin/zp" topology
) >build/installed_tools.log || { cat build/installed_tools.log; exit 1; }
tail -n 3 build/installed_tools.log

build/examples_alone/quickstart
"$prefix/bin/zp" run -n 4 -- build/examples_alone/cookbook_pipeline 2 1 2
echo "examples: $(find build/examples_alone -maxdepth 1 -type f -executable | wc -l) programs are built against the installation alone"

echo "headers: $(find "$prefix/include" -name '*.h' | wc -l) are installed"
[ "${1:-}" = --headers ] || exit 0

headers=build/public_headers
rm -rf "$headers"
mkdir -p "$headers"
cat >"$headers/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.25)
project(public_headers LANGUAGES CXX)
find_package(Zeropage REQUIRED)
file(GLOB sources ${PROJECT_SOURCE_DIR}/*.cpp)
add_library(public_headers OBJECT ${sources})
target_compile_features(public_headers PRIVATE cxx_std_20)
set_source_files_properties(${sources} PROPERTIES COMPILE_OPTIONS -fsyntax-only)
target_link_libraries(public_headers PRIVATE zeropage::zeropage)
# LibTorch's headers alone, which take most of the time. What includes neither them nor ours gets none.
target_precompile_headers(public_headers PRIVATE <torch/torch.h>)
file(STRINGS ${PROJECT_SOURCE_DIR}/alone.txt alone)
set_source_files_properties(${alone} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
END
for header in $(cd "$prefix/include" && find zeropage -name '*.h'); do
  source=$headers/$(tr '/.' '__' <<<"$header").cpp
  printf '#include <%s>\n' "$header" >"$source"
  grep -qE '#include [<"](torch|ATen|c10|zeropage)/' "$prefix/include/$header" || echo "${source##*/}" >>"$headers/alone.txt"
done
cmake -S "$headers" -B "$headers/build" "${against_install[@]}" >/dev/null
cmake --build "$headers/build" >"$headers/log" || { grep -A8 'error' "$headers/log"; exit 1; }
echo "public headers: $(ls "$headers"/*.cpp | wc -l) compile alone"
