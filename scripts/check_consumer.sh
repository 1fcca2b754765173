#!/usr/bin/env bash
# Installs Zeropage and builds outside projects against the install tree alone: examples/consumer, which then runs on two ranks. Old
# names of headers must lead to installed ones.
#
#   scripts/check_consumer.sh --headers    and a source for each public header, which includes nothing else of ours (4 minutes)
set -euo pipefail
cd "$(dirname "$0")/.."

prefix=$PWD/build/install
rm -rf "$prefix" build/consumer
cmake --install build/release --prefix "$prefix" >/dev/null
cmake -S examples/consumer -B build/consumer -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_PREFIX_PATH="$prefix" -DZEROPAGE_TORCH_DIR="$(echo .venv/lib/python3*/site-packages/torch | xargs realpath)" >/dev/null
cmake --build build/consumer
"$prefix/bin/zp" run -n 2 -- build/consumer/consumer

for header in $(sed -nE 's#^ +"([a-z_/0-9]+\.h) .*#\1#p' cmake/moved_headers.cmake); do
  now=$(sed -n 's/^#include "\(.*\)"$/\1/p' "$prefix/include/zeropage/$header")
  [ -n "$now" ] && [ -e "$prefix/include/zeropage/$now" ] ||
    { echo "check_consumer: <$header> leads to \"$now\", which is not installed" >&2; exit 1; }
done
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
# LibTorch's headers alone, which take most of the time.
target_precompile_headers(public_headers PRIVATE <torch/torch.h>)
END
for header in $(sed -nE 's#^ +([a-z_/0-9]+\.h)\)?$#\1#p' cmake/public_headers.cmake); do
  printf '#include <%s>\n' "$header" >"$headers/$(tr '/.' '__' <<<"$header").cpp"
done
cmake -S "$headers" -B "$headers/build" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" \
  -DZEROPAGE_TORCH_DIR="$(echo .venv/lib/python3*/site-packages/torch | xargs realpath)" >/dev/null
cmake --build "$headers/build" >"$headers/log" || { grep -A8 'error' "$headers/log"; exit 1; }
echo "public headers: $(ls "$headers"/*.cpp | wc -l) compile alone"
