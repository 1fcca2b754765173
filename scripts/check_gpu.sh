#!/usr/bin/env bash
# What only a CUDA device can show, in parts of at most six minutes each. A part begins with what is likeliest to fail.
#
#   scripts/check_gpu.sh [--out FOLDER] [--built FOLDER] [--go-on] [--dry-run] [PART...]
#   scripts/check_gpu.sh --list
#
#   --list     the parts, what they show, and the minutes that they are expected to take
#   --out      where figures and logs go, all of them also as check_gpu.tar.gz (build/check_gpu)
#   --built    the programs: carry/ where it is (`make carry`), else build/cuda
#   --go-on    with the next part after one that could not be done; without it, that is the end
#   --dry-run  names each command and its limit, looks whether its program is there, and starts none
#
# Without PART: all of the list but build, which makes build/cuda here: nvcc 13, CMake, Ninja, and bundle/ where the
# system lacks libraries. Needs a python3 with torch 2.11.0 for CUDA. Ends with every figure beside its goal, after
# failures too. Exit status: 0 all goals are met, or a dry run found its programs; 1 not; 2 no device, or the command
# line is wrong.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

part_seconds=360
part_list='first	5	versions, libraries, kernels, NCCL, short runs of each way to train, a snapshot of the memory
ranks	5	two ranks on one device, stages 0 to 3, fp32, bf16 and fp16: the same weights; the memory of the formula
micro_batches	6	the same with micro-batches and clipping, with stochastic rounding, and with 8-bit states
peers	5	a GPT of 350 M parameters in bf16 at stage 0 beside the bare loop
fsdp2	6	the same at stage 3 beside the bare loop and FSDP2
kernels	5	the fused AdamW, the norm and clipping beside copying and LibTorch; a profile of their kernels
sanitizer	6	memcheck without the caching allocator, racecheck'
out=build/check_gpu
built=
dry=
go_on=
parts=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
    --list)
      awk -F'\t' '{printf "%-14s %2d min  %s\n", $1, $2, $3; sum += $2} END {printf "%-14s %2d min\n", "all", sum}' <<<"$part_list"
      echo "build           6 min  not in all: the preset cuda for this device, warnings allowed; again goes on where it ended"
      exit 0 ;;
    --out | --built)
      [ $# -gt 1 ] || { echo "check_gpu: $1: expected a folder" >&2; exit 2; }
      if [ "$1" = --out ]; then out=$2; else built=$2; fi
      shift ;;
    --dry-run) dry=yes ;;
    --go-on) go_on=yes ;;
    *)
      if [ "$1" != build ] && ! cut -f1 <<<"$part_list" | grep -qxF -- "$1"; then
        printf 'check_gpu: %s: expected an option (--help) or parts, of: build %s\n' "$1" "$(cut -f1 <<<"$part_list" | tr '\n' ' ')" >&2
        exit 2
      fi
      parts+=("$1") ;;
  esac
  shift
done
[ ${#parts[@]} -gt 0 ] || mapfile -t parts < <(cut -f1 <<<"$part_list")
if [ -z "$built" ]; then
  built=build/cuda
  [ ! -x carry/examples/train_gpt ] || built=carry
fi

devices=$(nvidia-smi -L 2>/dev/null) || devices=
no_device="this machine has no CUDA device (nvidia-smi -L lists none)"
if [ -z "$devices" ] && [ -z "$dry" ]; then
  echo "check_gpu: $no_device; nothing was checked. --dry-run shows what would be" >&2
  exit 2
fi
[ -z "$devices" ] || printf '%s\n' "$devices"
export PATH=$PATH:/usr/local/cuda/bin
mkdir -p "$out"
out=$(realpath "$out")
figures=$out/figures.tsv
: >"$figures"

say() { printf '\033[1m==>\033[0m %s (%s s)\n' "$*" "$SECONDS"; }
# figure NAME VALUE GOAL met|MISSED|UNCHECKED: a line of the summary.
figure() { printf '%s\t%s\t%s\t%s\n' "$@" | tee -a "$figures"; }
left() { echo $((part_end - SECONDS)); }

# there COMMAND...: whether the program of a command, behind env and its variables, is on this machine.
there() {
  while [ "$1" = env ] || [[ $1 == *=* ]]; do shift; done
  command -v "$1" >/dev/null
}

# Each part returns 0, unless what failed leaves nothing to check in the parts after it.
#
# passes NAME SECONDS COMMAND...: runs it for at most so long, and no longer than the part; its output in a log.
passes() {
  local name=$1 seconds=$2 log=$out/${1//[^a-zA-Z0-9]/_}.log started=$SECONDS status
  shift 2
  if [ -n "$dry" ]; then
    commands=$((commands + 1))
    if there "$@"; then figure "$name" "at most $seconds s: $*" "is there" met; return 0; fi
    figure "$name" "is not there: $*" "is there" MISSED
    return 0
  fi
  if [ "$(left)" -lt 5 ]; then
    figure "$name" "not begun: the part's $part_seconds s are over" passes MISSED
    return 1
  fi
  [ "$seconds" -le "$(left)" ] || seconds=$(left)
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
  passes "$@"
  local status=$? log=$out/${1//[^a-zA-Z0-9]/_}.log passed skipped verdict=met
  [ -z "$dry" ] && [ -f "$log" ] || return $status
  passed=$(sed -n 's/^\[  PASSED  \] \([0-9]*\).*/\1/p' "$log")
  skipped=$(sed -n 's/^\[  SKIPPED \] \([0-9]*\) tests\?, .*/\1/p' "$log")
  { [ "${passed:-0}" -gt 0 ] && [ "${skipped:-0}" -eq 0 ]; } || verdict=MISSED
  figure "$1: tests" "${passed:-0} passed, ${skipped:-0} skipped" "none skipped" $verdict
  return $status
}

# read_figures NAME ARGUMENTS...: the summary's lines that scripts/gpu_figures.py makes of files, which a failed or
# stopped command may have left.
read_figures() {
  [ -z "$dry" ] || return 0
  scripts/gpu_figures.py "$@" 2>>"$out/gpu_figures.log" | tee -a "$figures"
  [ "${PIPESTATUS[0]}" -eq 0 ] || figure "$1 of $(basename "$2")" "could not be read" "can be" MISSED
}

# libraries PROGRAM: nothing that it needs is missing.
libraries() {
  ldd "$1" && ! ldd "$1" | grep 'not found'
}
export -f libraries

train=("$built/examples/train_gpt" --device cuda)
small=(--d-model 512 --layers 8 --heads 8 --sequence 256 --batch 4)

part_build() {
  local capability
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
  # Another compiler than this project's warns of other things.
  passes "configure" 60 cmake --preset cuda "-DCMAKE_CUDA_ARCHITECTURES=${capability:-90}" -DZEROPAGE_WERROR=OFF || return
  passes "build" 350 cmake --build --preset cuda -j "$(nproc)" --target train_gpt bare_loop optimizer_step gradient_pass \
    offload_test cuda_test comm_test memory_test train_gpt_cuda_test
}

part_first() {
  passes "versions" 30 bash -c 'nvidia-smi; python3 --version; python3 -c "import torch; print(torch.__version__)"' || return
  passes "libraries" 30 bash -c "libraries $built/examples/train_gpt && libraries $built/tests/offload_test" || return
  passes "three steps" 60 "${train[@]}" "${small[@]}" --steps 3 --compute-dtype bf16 --stage 0 || return
  passes "three steps at stage 3" 60 "${train[@]}" "${small[@]}" --steps 3 --compute-dtype bf16 --stage 3
  passes "two ranks on one device" 60 "${train[@]}" "${small[@]}" --steps 3 --ranks 2 --stage 3
  tests "kernels against the host's bits" 120 "$built/tests/offload_test" --gtest_filter='*Cuda*-WithoutCuda*'
  tests "offload on the device" 120 "$built/tests/cuda_test"
  tests "page-locked memory" 60 "$built/tests/memory_test" --gtest_filter='*Cuda*'
  local between=':NcclRanksTest.*'
  [ "$(wc -l <<<"$devices")" -lt 2 ] || between=
  tests "NCCL and staging" 90 "$built/tests/comm_test" "--gtest_filter=*Nccl*-NoNccl*$between"
  [ -z "$between" ] || figure "NCCL between devices" "one device here" "two devices" UNCHECKED
  tests "train_gpt as users run it" 240 env "TRAIN_GPT=$PWD/$built/examples/train_gpt" "$built/tests/train_gpt_cuda_test" \
    --gtest_filter='TrainGptCudaTest.*'
  local way
  for way in "--stage 3 --offload-optimizer host --offload-parameters host" "--offload-optimizer nvme:$out" \
    "--offload-activations host" "--offload-activations nvme:$out" "--checkpoint-activations blocks" \
    "--checkpoint-activations selective"; do
    # shellcheck disable=SC2086  # several flags
    passes "three steps with $way" 60 "${train[@]}" "${small[@]}" --steps 3 $way
  done
  passes "snapshot of the memory" 60 "${train[@]}" "${small[@]}" --steps 3 --memory-snapshot "$out/memory.pickle"
  return 0
}

# two_ranks NAME FLAGS...: short runs on one device, whose weights must be the same at all stages.
two_ranks() {
  local name=$1 stage run
  shift
  for stage in 0 1 2 3; do
    run=$out/two-ranks-$name-$stage.json
    rm -f "$run"
    passes "two ranks on one device, $name, stage $stage" 60 "${train[@]}" "${small[@]}" --ranks 2 --deterministic \
      --stage $stage --steps 5 --json "$run" "$@"
  done
  read_figures weights "$out/two-ranks-$name"-{0,1,2,3}.json
}

part_ranks() {
  local dtype
  for dtype in bf16 fp32 fp16; do
    two_ranks "$dtype" --compute-dtype $dtype
    [ $dtype = fp16 ] || read_figures memory "$out/two-ranks-$dtype-3.json"
  done
  return 0
}

part_micro_batches() {
  two_ranks bf16-accumulated --compute-dtype bf16 --accumulate 4 --clip-norm 1
  two_ranks bf16-stochastic --compute-dtype bf16 --low-precision-update stochastic
  two_ranks bf16-8bit --compute-dtype bf16 --low-precision-update split --optimizer-state 8bit
  two_ranks fp16-accumulated --compute-dtype fp16 --accumulate 4 --clip-norm 1
  return 0
}

# beside STAGE PEERS: 350 M parameters in bf16.
beside() {
  local run=$out/peers-stage$1.json
  passes "350 M at stage $1 beside $2" 350 python3 bench/against_peers.py --build "$built" --device cuda --ranks 1 \
    --threads 4 --d-model 1024 --layers 28 --heads 16 --sequence 1024 --batch 8 --steps 20 --compute-dtype bf16 \
    --rounds 3 --stage "$1" --peers "$2" --json "$run"
  read_figures peers "$run"
  return 0
}
part_peers() { beside 0 bare; }
part_fsdp2() { beside 3 bare,fsdp2; }

part_kernels() {
  local bench
  passes "optimizer step" 180 "$built/bench/optimizer_step" --device cuda --json "$out/optimizer_step.json"
  read_figures kernels "$out/optimizer_step.log"
  passes "gradient pass" 90 "$built/bench/gradient_pass" --device cuda --json "$out/gradient_pass.json"
  for bench in optimizer_step gradient_pass; do
    if [ -n "$dry" ] || command -v ncu >/dev/null; then
      passes "profile of $bench" 60 ncu --set detailed --launch-count 40 "$built/bench/$bench" --device cuda --numel 67108864 --rounds 1
    else
      figure "profile of $bench" "ncu is not here" "a profile" UNCHECKED
    fi
  done
  return 0
}

part_sanitizer() {
  local kernels='*Cuda*-WithoutCuda*:*OnHost*'
  # LibTorch asks CUDA what may fail, and handles it. A cached segment hides what runs past a tensor.
  tests "compute-sanitizer memcheck" 200 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \
    --report-api-errors no --error-exitcode 9 "$built/tests/offload_test" "--gtest_filter=$kernels"
  tests "compute-sanitizer racecheck" 200 compute-sanitizer --tool racecheck --report-api-errors no --error-exitcode 9 \
    "$built/tests/offload_test" "--gtest_filter=$kernels"
  return 0
}

# The programs of carry/ look for LibTorch under this link.
link_torch() {
  [ "$built" = carry ] && [ ! -e carry/site-packages ] || return 0
  local torch
  torch=$(python3 -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])' 2>/dev/null) ||
    torch=$(ls -d .venv/lib/python3*/site-packages/torch 2>/dev/null | head -n 1)
  [ -n "$torch" ] || { echo "check_gpu: python3 has no torch, and .venv neither; install torch==2.11.0" >&2; return 1; }
  ln -sfn "$(dirname "$torch")" carry/site-packages
}

summary() {
  say "summary"
  sort -t$'\t' -s -k4,4 "$figures" | awk -F'\t' '{printf "%-52s %-44s goal %-28s %s\n", $1, $2, $3, $4}'
  rm -f "$out/check_gpu.tar.gz"
  [ -n "$dry" ] || { find "$out" -maxdepth 1 -type f -size -32M ! -name '*.tar.gz' -printf '%P\0' |
    tar -C "$out" --null -T - -czf "$out/check_gpu.tar.gz" && echo "logs and figures: $out/check_gpu.tar.gz"; }
}
trap summary EXIT

for part in "${parts[@]}"; do
  say "$part"
  part_end=$((SECONDS + part_seconds))
  commands=0
  status=0
  if [ -n "$dry" ]; then
    "part_$part"
    echo "dry run of $part: $commands commands, at most $part_seconds s; nothing was started$([ -n "$devices" ] || echo ": $no_device")"
    continue
  fi
  if [ "$part" != build ] && { [ ! -x "$built/examples/train_gpt" ] || ! link_torch; }; then
    figure "$part" "nothing is in $built; bring carry/ (make carry) or call the part build" "is built" MISSED
    status=1
  else
    "part_$part"
    status=$?
  fi
  if [ $status -ne 0 ] && [ -z "$go_on" ]; then
    figure "$part" "could not be done; the parts after it were left out (--go-on)" "can be" MISSED
    break
  fi
done
missed=$(grep -c 'MISSED$' "$figures")
[ "$missed" -eq 0 ] && echo "all goals are met but those UNCHECKED" && exit 0
echo "$missed goals are missed"
exit 1
