#!/usr/bin/env bash
# Formatting, structure, the drawn picture, then clang-tidy.
#
#   scripts/lint.sh              everything
#   scripts/lint.sh --library    clang-tidy sees the library and not what is in tools/, examples/ and bench/: what .ci/run does
#   scripts/lint.sh --fast       without clang-tidy
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
  '' | --library | --fast) ;;
  *) printf 'lint: %s: expected --library or --fast\n' "$1" >&2; exit 2 ;;
esac
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

# clang-tidy takes 10 to 20 s for LibTorch's headers, and little for a source behind them. So it sees the sources of a target as one, and the
# library takes less than two minutes on two cores. Without a precompiled header: clang cannot read g++'s.
cmake -S . -B build/tidy -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON -DCMAKE_UNITY_BUILD=ON \
  -DCMAKE_UNITY_BUILD_BATCH_SIZE=0 -DCMAKE_CXX_COMPILER_LAUNCHER= -DZEROPAGE_TESTS=OFF >/dev/null
mapfile -t checked < <(sed -n 's/^ *"file": "\(.*\)",\{0,1\}$/\1/p' build/tidy/compile_commands.json)
checks=-bugprone-suspicious-include
if [ "${1:-}" = --library ]; then
  # The library has some hundred findings of these, which the whole lint shows: functions that a destructor calls and that are not noexcept,
  # const results that are copied, vectors without reserve(), products of small constants, and a few of each other. None was a defect.
  for left in bugprone-{branch-clone,exception-escape,implicit-widening-of-multiplication-result,macro-parentheses} modernize-use-nullptr \
    performance-{inefficient-string-concatenation,inefficient-vector-operation,no-automatic-move,no-int-to-ptr,unnecessary-value-param}; do
    checks+=,-$left
  done
  mapfile -t checked < <(printf '%s\n' "${checked[@]}" | grep -vE "^$PWD/(build/tidy/)?(tools|examples|bench)/")
fi
# tidy HEADERS SOURCE
tidy() {
  local said
  # What is made of a target's sources includes them. Flags may be g++'s alone. typeid(*pointer) is meant so.
  said=$(clang-tidy --quiet -p build/tidy --header-filter="$1" --checks="$checks" \
    --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-unused-command-line-argument \
    --extra-arg=-Wno-potentially-evaluated-expression "$2" 2>&1) && echo "tidy: ${2#"$PWD/"}" && return
  printf '%s\n' "$said"
  return 1
}
export -f tidy
export checks
headers="/(include/zeropage|$(scripts/layers.py | tr ' ' '|')|examples|tools|bench)/"
printf '%s\n' "${checked[@]}" | xargs -P "$(nproc)" -I{} bash -c 'tidy "$1" "$2"' _ "$headers" {}
