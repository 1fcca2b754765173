#!/usr/bin/env bash
# Formatting, structure, the drawn picture, then clang-tidy over all sources (minutes: it parses LibTorch's headers
# for each).
#
#   scripts/lint.sh            everything
#   scripts/lint.sh --fast     without clang-tidy
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t sources < <(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')
clang-format --dry-run --Werror "${sources[@]}"
echo "format: ${#sources[@]} files are clean"
scripts/check_structure.py
scripts/class_sizes.py --check
scripts/check_unity.py
scripts/check_gpu_parts.py
scripts/check_docs.py
scripts/rooms.py --check >/dev/null && echo "rooms: no arrow runs back"
scripts/paging_picture.py --check
[ "${1:-}" = --fast ] && exit

# Without a precompiled header: clang cannot read g++'s.
cmake -S . -B build/tidy -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON \
  -DCMAKE_CXX_COMPILER_LAUNCHER= -DZEROPAGE_TESTS=OFF >/dev/null
mapfile -t checked < <(git ls-files '*.cpp' | grep -E "^($(scripts/layers.py | tr ' ' '|')|tools|examples|bench)/" | grep -v '/cuda/')
headers="/(include/zeropage|$(scripts/layers.py | tr ' ' '|')|examples|tools|bench)/"
printf '%s\n' "${checked[@]}" |
  xargs -P "$(nproc)" -I{} sh -c 'clang-tidy --quiet --header-filter="$2" -p build/tidy "$1" 2>/dev/null && echo "tidy: $1"' _ {} "$headers"
