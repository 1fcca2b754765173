#!/usr/bin/env bash
# Builds the tests under AddressSanitizer with UndefinedBehaviorSanitizer, and under ThreadSanitizer, and runs them.
# A report fails its test. tests/README.md says what the two do not look at.
#
#   scripts/sanitize.sh [address|thread]      all tests, under both unless told; an hour on 2 cores
#   scripts/sanitize.sh --sample [VERSION]    what .ci/run does: training by every habit, over ranks as threads, and work that is counted
#                                             (tests/zero/linear_work_test.cpp); 4 minutes; by clang, which scripts/setup.sh --fuzz
#                                             installs.
#                                             Under AddressSanitizer with LibTorch VERSION, which check_libtorch.sh installs
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { printf 'sanitize: %s: expected address, thread, or --sample [VERSION]\n' "$1" >&2; exit 2; }
presets=(asan tsan)
case ${1:-} in
  '') ;;
  address) presets=(asan) ;;
  thread) presets=(tsan) ;;
  --sample) ;;
  *) usage "$1" ;;
esac

build() {  # preset, folder, targets
  NINJA_STATUS="[$1 %f/%t, %es] " cmake --build "$2" -j "$(nproc)" --target "${@:3}"
}

if [ "${1:-}" != --sample ]; then
  for preset in "${presets[@]}"; do
    cmake --preset "$preset" >/dev/null
    build "$preset" "build/$preset" all
  done
  for preset in "${presets[@]}"; do ctest --preset "$preset" -j "$((4 * $(nproc)))"; done
  exit
fi

# The sample's time is its compiler's. So it is not optimised, and clang compiles it, which takes less than half of g++'s time here. Each
# build compiles the whole library as one source, which needs no precompiled header and takes a third less. Both run at once, on a
# core each. Warnings are those of the other builds.
command -v clang++ >/dev/null || { echo 'sanitize: no clang++, which compiles the sample. Call scripts/setup.sh --fuzz' >&2; exit 1; }
by_clang=(-DCMAKE_CXX_COMPILER=clang++ -DCMAKE_CXX_FLAGS_RELWITHDEBINFO='-O0 -g1 -DNDEBUG -w'
          -DCMAKE_UNITY_BUILD_BATCH_SIZE=0 -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON)
other_torch=()
if [ $# -gt 1 ]; then
  scripts/check_libtorch.sh "$2" --install
  other_torch=(-DZEROPAGE_TORCH_DIR="$(echo "$PWD/.venv-torch-$2"/lib/python3*/site-packages/torch)")
fi
cmake --preset asan -B build/asan-sample "${by_clang[@]}" "${other_torch[@]}" | grep Zeropage: || true
cmake --preset tsan -B build/tsan-sample "${by_clang[@]}" >/dev/null
build asan build/asan-sample habits_test linear_work_test &
build tsan build/tsan-sample habits_test
wait $!
for sample in asan-sample tsan-sample; do
  ctest --test-dir "build/$sample" -R '^(habits|linear_work)_test' -j "$((4 * $(nproc)))" --output-on-failure
done
