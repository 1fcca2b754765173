#!/usr/bin/env bash
# Runs tests of bits and of tolerances as if the processor had fewer instructions: LibTorch, oneDNN, MKL and our own kernels choose theirs by
# variables. What is right with AVX-512 only by luck is red here.
#
#   scripts/check_cpu_capabilities.sh [--build FOLDER]   a sample of the built tests under AVX2, then under SSE4; two minutes on 2 cores
#   scripts/check_cpu_capabilities.sh --all              builds and runs the whole suite under each, by the preset release
#
#   --build    where the tests are (build/release)
#
# Ends with a line for each setting. Exit status: 0 all passed; 1 some failed, or ran not, and which; 2 the command line is wrong.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

build=build/release
all=
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
    --all) all=yes ;;
    --build) build=${2:?check_cpu_capabilities: --build: expected a folder}; shift ;;
    *) echo "check_cpu_capabilities: $1: expected --all or --build FOLDER" >&2; exit 2 ;;
  esac
  shift
done

# Name, and its variables. The kernels of optim/cpu/ refuse what the processor lacks.
settings=('AVX2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ZEROPAGE_CPU_CAPABILITY=avx2'
          'SSE4 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=sse41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 ZEROPAGE_CPU_CAPABILITY=default')
# Program and which of its tests: kernels, norms, and sums whose order follows the width of vectors.
sample=('optim_test -*Cuda*:WorkerPool*'
        'parallel_test *SyncBatchNorm*:NormOverSlicesTest*'
        'proofs_test GradientNormTest.*:ClipTest.*:WideParityTest.*:*/ParityTest.*/1?'
        'examples_test PipelineFlagsTest.HasThe*')
logs=build/cpu_capabilities
mkdir -p "$logs"

# run_sample LOG VARIABLES...: the programs of the sample two at a time; each one's exit status ends its log.
run_sample() {
  local log=$1
  shift
  # shellcheck disable=SC2016  # that shell expands it
  printf '%s\n' "${sample[@]}" | env OMP_WAIT_POLICY=passive "$@" xargs -P 2 -L 1 bash -c \
    '"$0/tests/$2" "--gtest_filter=$3" >"$1.$2" 2>&1; status=$?; echo "exit status $status" >>"$1.$2"; exit $((status != 0))' \
    "$build" "$log"
}

# report NAME LOG SECONDS: the line of a setting; returns whether each program of the sample ran some tests, and all passed.
report() {
  local name=$1 log=$2 seconds=$3 program passed=0 skipped=0 ran bad=0
  for program in "${sample[@]%% *}"; do
    ran=$(awk '/^\[  PASSED  \]/ {sum += $4} END {print sum + 0}' "$log.$program")
    skipped=$((skipped + $(awk '/^\[  SKIPPED \] [0-9]+ tests?[,.]/ {sum += $4} END {print sum + 0}' "$log.$program")))
    passed=$((passed + ran))
    [ "$ran" -gt 0 ] && tail -n 1 "$log.$program" | grep -qx 'exit status 0' && continue
    bad=1
    printf '%s under %s failed (%s has all output):\n' "$program" "$name" "$log.$program"
    grep -B 1 -A 12 ': Failure$' "$log.$program" | head -n 60
    grep '^\[  FAILED  \].*[^)]$' "$log.$program" || tail -n 5 "$log.$program"
  done
  printf '%s: %s passed, %s skipped, %s, %s s\n' "$name" "$passed" "$skipped" \
    "$([ $bad -eq 0 ] && echo "none failed" || echo "SOME FAILED")" "$seconds"
  return $bad
}

if [ -n "$all" ]; then
  cmake --preset release >/dev/null && cmake --build --preset release -j "$(nproc)" --target tests || exit 1
else
  for program in "${sample[@]%% *}"; do
    [ -x "$build/tests/$program" ] ||
      { echo "check_cpu_capabilities: $build/tests/$program: is not built; call make test, or name another --build" >&2; exit 1; }
  done
fi
failed=0
lines=()
for setting in "${settings[@]}"; do
  read -r name variables <<<"$setting"
  read -ra variables <<<"$variables"
  started=$SECONDS
  if [ "$name" = AVX2 ] && ! grep -qw avx2 /proc/cpuinfo; then
    lines+=("AVX2: this processor has none; nothing was run")
    failed=1
  elif [ -n "$all" ]; then
    if env "${variables[@]}" scripts/run_tests.sh release "$((4 * $(nproc)))" -LE bench; then
      lines+=("$name: the whole suite passed, $((SECONDS - started)) s")
    else
      lines+=("$name: the suite FAILED, $((SECONDS - started)) s")
      failed=1
    fi
  else
    run_sample "$logs/$name" "${variables[@]}"
    lines+=("$(report "$name" "$logs/$name" $((SECONDS - started)))") || failed=1
  fi
done
printf '%s\n' "${lines[@]}"
exit $failed
