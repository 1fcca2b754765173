#!/usr/bin/env bash
# Everything that needs a CUDA device, in one go: about 8 minutes on 16 cores and an H200. Needs nvcc 13, CMake, Ninja,
# a python3 with torch 2.11.0 for CUDA, and, where the system lacks the other libraries, bundle/ (`make bundle`).
#
#   scripts/check_gpu.sh [--out FOLDER] [PART...]
#
#   build      the preset cuda, for the architecture of device 0 only
#   tests      the kernels, NCCL, worlds and training on a device
#   sanitizer  compute-sanitizer's memcheck and racecheck over the tests of the kernels
#   kernels    the fused AdamW against copying and LibTorch's; norm and clipping against LibTorch's calls
#   training   a GPT of 350 M parameters in bf16 against the bare loop and FSDP2; weights and memory of two ranks, with
#              micro-batches in each precision too
#
# Without PART: all, in this order. Ends with every figure beside its goal; logs and JSON are in FOLDER
# (build/check_gpu). Exit status: 0 all goals are met; 1 some are not; 2 no device, or the command line is wrong.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

all_parts=(build tests sanitizer kernels training)
out=build/check_gpu
parts=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
    --out) [ $# -gt 1 ] || { echo "check_gpu: --out: expected a folder" >&2; exit 2; }; out=$2; shift ;;
    build | tests | sanitizer | kernels | training) parts+=("$1") ;;
    *) printf 'check_gpu: %s: expected --out FOLDER or one of: %s\n' "$1" "${all_parts[*]}" >&2; exit 2 ;;
  esac
  shift
done
[ ${#parts[@]} -gt 0 ] || parts=("${all_parts[@]}")

devices=$(nvidia-smi -L 2>/dev/null) || devices=
if [ -z "$devices" ]; then
  echo "check_gpu: this machine has no CUDA device (nvidia-smi -L lists none); nothing was checked" >&2
  exit 2
fi
printf '%s\n' "$devices"
export PATH=$PATH:/usr/local/cuda/bin
mkdir -p "$out"
figures=$out/figures.tsv
: >"$figures"
built=build/cuda

say() { printf '\033[1m==>\033[0m %s (%s s)\n' "$*" "$SECONDS"; }
# figure NAME VALUE GOAL met|MISSED|UNCHECKED: a line of the summary.
figure() { printf '%s\t%s\t%s\t%s\n' "$@" | tee -a "$figures"; }

# passes NAME SECONDS COMMAND...: runs it for at most so long, its output in a log; a line of the summary says whether it passed.
passes() {
  local name=$1 seconds=$2 log started=$SECONDS status
  shift 2
  log=$out/${name//[^a-zA-Z0-9]/_}.log
  timeout --kill-after=10 "$seconds" "$@" >"$log" 2>&1
  status=$?
  if [ $status -eq 0 ]; then
    figure "$name" "passed in $((SECONDS - started)) s" passes met
    return 0
  fi
  [ $status -ne 124 ] || status="$status, stopped after $seconds s"
  figure "$name" "exit status $status" passes MISSED
  tail -n 15 "$log"
  return 1
}

# tests NAME SECONDS COMMAND...: as `passes`, and some ran and none was skipped: a test without what it needs checks nothing.
tests() {
  passes "$@" || return
  local log=$out/${1//[^a-zA-Z0-9]/_}.log passed skipped verdict=met
  passed=$(sed -n 's/^\[  PASSED  \] \([0-9]*\).*/\1/p' "$log")
  skipped=$(sed -n 's/^\[  SKIPPED \] \([0-9]*\) tests\?, .*/\1/p' "$log")
  { [ "${passed:-0}" -gt 0 ] && [ "${skipped:-0}" -eq 0 ]; } || verdict=MISSED
  figure "$1: tests" "${passed:-0} passed, ${skipped:-0} skipped" "none skipped" $verdict
}

part_build() {
  local capability
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
  passes "configure" 120 cmake --preset cuda "-DCMAKE_CUDA_ARCHITECTURES=${capability:-90}" || return
  passes "build" 500 cmake --build --preset cuda -j "$(nproc)" --target train_gpt bare_loop optimizer_step \
    gradient_pass offload_test comm_test comm_device_test device_test
}

part_tests() {
  local between=':NcclRanksTest.*'
  [ "$(wc -l <<<"$devices")" -lt 2 ] || between=
  tests "kernels against the host's bits" 180 "$built/tests/offload_test" --gtest_filter='*Cuda*-WithoutCuda*'
  tests "NCCL and staging" 120 "$built/tests/comm_test" "--gtest_filter=*Nccl*-NoNccl*$between"
  [ -z "$between" ] || figure "NCCL between devices" "one device here" "two devices" UNCHECKED
  tests "worlds of devices" 120 "$built/tests/comm_device_test" --gtest_filter=-'*SaysWhyThereIsNoCuda*'
  tests "training on a device" 180 "$built/tests/device_test"
}

part_sanitizer() {
  local tool
  for tool in memcheck racecheck; do
    # LibTorch asks CUDA what may fail, and handles it.
    tests "compute-sanitizer $tool" 150 compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 9 \
      "$built/tests/offload_test" --gtest_filter='*Cuda*-WithoutCuda*'
  done
}

# read_figures NAME ARGUMENTS...: the summary's lines that scripts/gpu_figures.py makes of files.
read_figures() {
  scripts/gpu_figures.py "$@" | tee -a "$figures"
  [ "${PIPESTATUS[0]}" -eq 0 ] || figure "$1" "could not be read" "can be" MISSED
}

part_kernels() {
  passes "optimizer step" 120 "$built/bench/optimizer_step" --device cuda || return
  read_figures kernels "$out/optimizer_step.log"
  passes "gradient pass" 120 "$built/bench/gradient_pass" --device cuda
}

part_training() {
  local gpt=(--d-model 1024 --layers 28 --heads 16 --sequence 1024 --batch 8 --steps 20 --compute-dtype bf16)
  local peers stage dtype run
  for stage in 0 3; do
    peers=bare
    [ $stage = 0 ] || peers=bare,fsdp2
    run=$out/peers-stage$stage.json
    passes "350 M at stage $stage beside $peers" 240 python3 bench/against_peers.py --device cuda --ranks 1 --threads 4 \
      "${gpt[@]}" --rounds 3 --stage $stage --peers $peers --json "$run" || continue
    read_figures peers "$run"
  done
  for dtype in fp32 bf16; do
    two_ranks "$dtype" --compute-dtype $dtype
    read_figures memory "$out/two-ranks-$dtype-3.json"
  done
  for dtype in fp32 bf16 fp16; do
    two_ranks "$dtype-accumulated" --compute-dtype $dtype --accumulate 4 --clip-norm 1
  done
  two_ranks bf16-stochastic --compute-dtype bf16 --low-precision-update stochastic
}

# two_ranks NAME FLAGS...: short runs on one device, whose weights must be the same at all stages.
two_ranks() {
  local name=$1 stage run
  shift
  for stage in 0 1 2 3; do
    run=$out/two-ranks-$name-$stage.json
    rm -f "$run"
    passes "two ranks on one device, $name, stage $stage" 60 "$built/examples/train_gpt" --device cuda --ranks 2 \
      --deterministic --stage $stage --d-model 512 --layers 8 --heads 8 --sequence 256 --batch 4 --steps 5 \
      --json "$run" "$@"
  done
  read_figures weights "$out/two-ranks-$name"-{0,1,2,3}.json
}

for part in "${parts[@]}"; do
  say "$part"
  if [ "$part" != build ] && [ ! -x $built/examples/train_gpt ]; then
    figure "$part" "nothing is built" "is built" MISSED
    continue
  fi
  "part_$part"
done

say "summary"
sort -t$'\t' -s -k4,4 "$figures" | awk -F'\t' '{printf "%-52s %-44s goal %-28s %s\n", $1, $2, $3, $4}'
missed=$(grep -c 'MISSED$' "$figures")
[ "$missed" -eq 0 ] && echo "all goals are met but those UNCHECKED" && exit
echo "$missed goals are missed"
exit 1
