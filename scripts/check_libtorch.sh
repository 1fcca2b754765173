#!/usr/bin/env bash
# Builds Zeropage with another LibTorch from PyPI, runs the tests, and trains train_gpt at each stage, whose weights can be
# compared between releases of LibTorch: as bits, or, where its own kernels differ, as the last loss.
#
#   scripts/check_libtorch.sh VERSION                 all of it; 20 minutes on 2 cores
#   scripts/check_libtorch.sh VERSION --tests REGEX   only the tests whose names match; binaries are built whose names match
#   scripts/check_libtorch.sh VERSION --install       only installs that LibTorch, for `scripts/sanitize.sh --sample VERSION`
#
# LibTorch goes to .venv-torch-VERSION (1.3 to 2 GB), the build to build/torch-VERSION (1 GB); remove both afterwards. What
# has no part in LibTorch, such as oneTBB, is .venv's.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { printf 'check_libtorch: %s; expected VERSION [--tests REGEX | --install]\n' "$1" >&2; exit 2; }
version=${1:-}
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || usage "'$version' is no version such as 2.11.0"
shift
tests=. install_only=
while [ $# -gt 0 ]; do
  case $1 in
    --tests) [ $# -gt 1 ] || usage "--tests lacks its REGEX"; tests=$2; shift ;;
    --install) install_only=yes ;;
    *) usage "'$1' is no flag" ;;
  esac
  shift
done

environment=$PWD/.venv-torch-$version
build=build/torch-$version

# torch alone, and of what it requires only the two libraries without which libtorch_cpu.so does not load.
install_libtorch() {
  local stamp=$environment/.zeropage-installed
  [ -e "$stamp" ] && return
  python3 -m venv "$environment"
  local pip=("$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)
  "${pip[@]}" --no-deps "torch==$version"
  local required
  mapfile -t required < <("$environment/bin/python" - <<'END'
import importlib.metadata
import re

for line in importlib.metadata.requires("torch"):
    line = line.split(";")[0].strip()
    if re.match(r"nvidia-cuda-(runtime|cupti)-cu\d+==", line):
        print(line)
    elif match := re.match(r"cuda-toolkit\[.*\](==.*)", line):
        print("cuda-toolkit[cudart,cupti]" + match[1])
END
  )
  # pip warns of what torch's Python side misses; nothing of it is used.
  "${pip[@]}" "${required[@]}" 2> >(grep -v "^torch $version requires\|dependency resolver" >&2)
  touch "$stamp"
}

configure() {
  cmake -S . -B "$build" -G Ninja -DZEROPAGE_BENCH=OFF -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=75 \
    -DZEROPAGE_TORCH_DIR="$(echo "$environment"/lib/python3*/site-packages/torch)" "$@" | grep 'Zeropage:' || true
}

build_targets() { NINJA_STATUS="[LibTorch $version %f/%t, %es] " cmake --build "$build" -j "$(nproc)" --target "$@"; }

# A small run. Its text is not LibTorch's headers, train_gpt's default, as those differ.
train_gpt_at_stage() {
  "$build/examples/train_gpt" --ranks 2 --stage "$1" --threads 1 --data DESIGN.md --d-model 64 --layers 2 --heads 2 \
    --sequence 64 --batch 2 --steps 20 --seed 1 --json "$build/stage_$1.json" >"$build/stage_$1.log" 2>&1 ||
    { printf '  stage %s failed:\n' "$1"; tail -5 "$build/stage_$1.log"; return 1; }
  python3 - "$1" "$build/stage_$1.json" <<'END'
import json
import sys

run = json.load(open(sys.argv[2]))
print(f"  stage {sys.argv[1]}: weights_sha256 {run['weights_sha256']}, last loss {run['loss'][-1]:.9f}")
END
}

# Cases of GoogleTest in the log of ctest, which counts processes.
cases() { sed -nE "s/^\[  $1 +\] ([0-9]+) tests?.*/\1/p" "$build/Testing/Temporary/LastTest.log" | awk '{sum += $1} END {print sum + 0}'; }

scripts/setup.sh
install_libtorch
[ -z "$install_only" ] || exit 0

configure -DCMAKE_BUILD_TYPE=Release -DZEROPAGE_TESTS=ON
mapfile -t binaries < <(cmake --build "$build" --target help | sed -nE 's/^([a-z_]+_test): phony$/\1/p' | sort -u | grep -E -- "$tests" || true)
[ "$tests" != . ] && [ ${#binaries[@]} -gt 0 ] || binaries=(all)
build_targets programs "${binaries[@]}"
failed=
ctest --test-dir "$build" -R "$tests" -j "$((2 * $(nproc)))" --output-on-failure || failed=failed

echo
echo "LibTorch $version: built programs, ${binaries[*]}"
echo "  tests '$tests': $(cases PASSED) cases passed, $(cases FAILED) failed, $(cases SKIPPED) skipped; ctest: ${failed:-passed}"
for stage in 0 1 2 3; do train_gpt_at_stage "$stage" || failed=failed; done
[ -z "$failed" ]
