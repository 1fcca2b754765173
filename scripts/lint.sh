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
mapfile -t checked < <(git ls-files 'memory/*.cpp' 'device/*.cpp' 'operators/*.cpp' 'paging/*.cpp' 'comm/*.cpp' 'offload/*.cpp' 'accumulate/*.cpp' 'checkpointing/*.cpp' 'data/*.cpp' 'state/*.cpp' 'parallel/*.cpp' 'zero/*.cpp' 'planning/*.cpp' 'profile/*.cpp' 'tools/*.cpp' 'examples/*.cpp' 'bench/*.cpp' | grep -v '/cuda/')
printf '%s\n' "${checked[@]}" |
  xargs -P "$(nproc)" -I{} sh -c 'clang-tidy --quiet -p build/tidy "$1" 2>/dev/null && echo "tidy: $1"' _ {}
