#!/usr/bin/env bash
# Builds the tests under AddressSanitizer with UndefinedBehaviorSanitizer, and under ThreadSanitizer, and runs them.
# A report fails its test. tests/README.md says what the two do not look at.
#
#   scripts/sanitize.sh [address|thread]      all tests, under both unless told; an hour on 2 cores
#   scripts/sanitize.sh --sample              what .ci/run does: training by every habit, over ranks as threads
set -euo pipefail
cd "$(dirname "$0")/.."

presets=(asan tsan)
targets=(all)
chosen=()
for argument in "$@"; do
  case $argument in
    address) presets=(asan) ;;
    thread) presets=(tsan) ;;
    --sample) targets=(habits_test) chosen=(-R '^habits_test') ;;
    *) printf 'sanitize: %s: expected address, thread or --sample\n' "$argument" >&2; exit 2 ;;
  esac
done

for preset in "${presets[@]}"; do
  cmake --preset "$preset" >/dev/null
  NINJA_STATUS="[$preset %f/%t, %es] " cmake --build --preset "$preset" -j "$(nproc)" --target "${targets[@]}"
done
for preset in "${presets[@]}"; do
  ctest --preset "$preset" -j "$((3 * $(nproc)))" "${chosen[@]}"
done
