#!/usr/bin/env bash
# What only a CUDA device can show, in parts (scripts/gpu_parts.sh). A part begins with what is likeliest to fail.
#
#   scripts/check_gpu.sh [--out FOLDER] [--built FOLDER] [--go-on] [--dry-run] [PART...]
#   scripts/check_gpu.sh --list
#
#   --list     the parts, what they show, and the minutes that they are expected to take; a part is stopped at twice those
#   --out      where figures and logs go, all of them also as check_gpu.tar.gz (build/check_gpu)
#   --built    the programs; by default those of carry/zeropage.tar.xz (`make carry`), which is unpacked into build/carried where that has
#              others, and without an archive build/cuda
#   --go-on    with the next part after one that could not be done; without it, that is the end
#   --dry-run  names each command and its limit, looks whether its program is there, and starts none
#
# Without PART: those that --list marks with *, twelve minutes together. The part build makes build/cuda here: nvcc 13, CMake, Ninja, and
# bundle/ where the system lacks libraries. Needs a python3 with torch 2.11.0 for CUDA. Ends with every figure beside its goal, after
# failures too. Exit status: 0 all goals are met, or a dry run found its programs; 1 not; 2 no device, or the command
# line is wrong.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

# Name, expected seconds, * by default, what it shows.
part_list='first	25	*	versions, libraries, three steps at stages 0 and 3, two ranks on one device
mends	20	*	activations on NVMe 20 times, what is chosen below limits of memory, page-locked memory, bits of NaN
small	60	*	AdamW of one stretch, of 10,000 tensors and of 8-bit states, beside copying and LibTorch
memory	60	*	peak and reserved memory of 1.2 G parameters in bf16 at stages 0 and 3, beside the bare loop
images	20	*	train_imagenet and train_resnet, with SyncBatchNorm too, on images made here, beside the host
offload_1b	45	*	the offloaded optimizer, 1.2 G parameters, 1 and 8 micro-batches
offload_6b	260	*	the same, 6.4 G parameters, 8 and 32 micro-batches (needs 80 GiB of host memory)
kernels	20	*	kernels against the bits of the host, offload on the device, NCCL and staging
train_gpt	60	*	train_gpt as users run it: its tests, each way to offload and to recompute, a snapshot of the memory
ranks	40	*	two ranks on one device, stages 0 to 3, fp32, bf16 and fp16: the same weights; the memory of the formula
micro_batches	60	*	the same with micro-batches and clipping, with stochastic rounding, and with 8-bit states
meshes	35	*	tensor, pipeline, zero-bubble, --shard-within and stage 3 on four ranks: the losses of one rank
states	20	*	a state of two ranks at stage 3, resumed by one rank at stage 1 and on the host; a killed rank
peers	240	-	a GPT of 300 M parameters in bf16 at stage 0 beside the bare loop, PyTorch eager and torch.compile
fsdp2	240	-	the same at stage 3 beside the bare loop and FSDP2
profiles	120	-	gradient norm and clipping beside LibTorch; a profile of the kernels
sanitizer	360	-	memcheck without the caching allocator, racecheck
build	360	-	the preset cuda for this device, warnings allowed; again goes on where it ended'
out=build/check_gpu
built=
dry=
go_on=
parts=()
names() { awk -F'\t' "$1"'{print $1}' <<<"$part_list"; }
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
    --list)
      awk -F'\t' '{printf "%-14s %s %4.1f min  %s\n", $1, $3 == "*" ? "*" : " ", $2 / 60, $4; sum += $2 * ($3 == "*")}
                  END {printf "%-14s * %4.1f min\n", "without PART", sum / 60}' <<<"$part_list"
      exit 0 ;;
    --out | --built)
      [ $# -gt 1 ] || { echo "check_gpu: $1: expected a folder" >&2; exit 2; }
      if [ "$1" = --out ]; then out=$2; else built=$2; fi
      shift ;;
    --dry-run) dry=yes ;;
    --go-on) go_on=yes ;;
    *)
      if ! names '' | grep -qxF -- "$1"; then
        printf 'check_gpu: %s: expected an option (--help) or parts, of: %s\n' "$1" "$(names '' | tr '\n' ' ')" >&2
        exit 2
      fi
      parts+=("$1") ;;
  esac
  shift
done
# shellcheck disable=SC2016
[ ${#parts[@]} -gt 0 ] || mapfile -t parts < <(names '$3 == "*" ')

devices=$(nvidia-smi -L 2>/dev/null) || devices=
no_device="this machine has no CUDA device (nvidia-smi -L lists none)"
if [ -z "$devices" ] && [ -z "$dry" ]; then
  echo "check_gpu: $no_device; nothing was checked. --dry-run shows what would be" >&2
  exit 2
fi
[ -z "$devices" ] || printf '%s\n' "$devices"

# unpack ARCHIVE FOLDER: so that the folder has what the archive has, and says which one that was.
unpack() {
  local archive=$1 folder=$2 sum
  sum=$(sha256sum <"$archive" | cut -d' ' -f1)
  if [ "$(cat "$folder/archive.sha256" 2>/dev/null)" = "$sum" ]; then
    echo "$folder has what $archive has"
    return
  fi
  rm -rf "$folder" && mkdir -p "$folder" || return
  # Python reads xz itself, where there is no such program.
  if command -v xz >/dev/null; then tar -C "$folder" -xf "$archive"; else python3 -m tarfile -e "$archive" "$folder"; fi || return
  echo "$sum" >"$folder/archive.sha256"
  echo "unpacked $archive into $folder"
}
if [ -z "$built" ]; then
  built=build/cuda
  if [ -f carry/zeropage.tar.xz ]; then
    built=build/carried
    unpack carry/zeropage.tar.xz $built || { echo "check_gpu: carry/zeropage.tar.xz could not be unpacked into $built" >&2; exit 1; }
  fi
fi

export PATH=$PATH:/usr/local/cuda/bin
mkdir -p "$out"
out=$(realpath "$out")
figures=$out/figures.tsv
: >"$figures"

say() { printf '\033[1m==>\033[0m %s (%s s)\n' "$*" "$SECONDS"; }
# figure NAME VALUE GOAL met|MISSED|UNCHECKED: a line of the summary.
figure() { printf '%s\t%s\t%s\t%s\n' "$@" | tee -a "$figures"; }
left() { echo $((part_end - SECONDS)); }

# there COMMAND...: whether the program of a command, behind what starts it, is on this machine.
there() {
  while [ "$1" = env ] || [[ $1 == *=* ]]; do shift; done
  [ "$1" != scripts/kill_a_rank.py ] || shift 2
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
  # Over all repetitions.
  passed=$(awk '/^\[  PASSED  \]/ {sum += $4} END {print sum + 0}' "$log")
  skipped=$(awk '/^\[  SKIPPED \] [0-9]+ tests?[,.]/ {sum += $4} END {print sum + 0}' "$log")
  { [ "$passed" -gt 0 ] && [ "$skipped" -eq 0 ]; } || verdict=MISSED
  figure "$1: tests" "$passed passed, $skipped skipped" "none skipped" $verdict
  return $status
}

# read_figures WHAT ARGUMENTS...: the summary's lines that scripts/gpu_figures.py makes of files, which a failed or stopped command may
# have left.
read_figures() {
  [ -z "$dry" ] || return 0
  scripts/gpu_figures.py "$@" 2>>"$out/gpu_figures.log" | tee -a "$figures"
  [ "${PIPESTATUS[0]}" -eq 0 ] || figure "$1 of ${*:2}" "could not be read" "can be" MISSED
}

# train NAME SECONDS FLAGS...: train_gpt, whose figures go to NAME.json.
train() {
  local run=$out/${1//[^a-zA-Z0-9.]/-}.json
  rm -f "$run"
  passes "$1" "$2" "$built/examples/train_gpt" --device "$device" --json "$run" "${@:3}"
}

# shellcheck source=scripts/gpu_parts.sh
. scripts/gpu_parts.sh

# The programs of the archive look for LibTorch under this link.
link_torch() {
  [ "$built" = build/carried ] && [ ! -e build/carried/site-packages ] || return 0
  local torch
  torch=$(python3 -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])' 2>/dev/null) ||
    torch=$(ls -d "$PWD"/.venv/lib/python3*/site-packages/torch 2>/dev/null | head -n 1)
  [ -n "$torch" ] || { echo "check_gpu: python3 has no torch, and .venv neither; install torch==2.11.0" >&2; return 1; }
  ln -sfn "$(dirname "$torch")" build/carried/site-packages
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
  expected_seconds=$(awk -F'\t' -v name="$part" '$1 == name {print $2}' <<<"$part_list")
  part_seconds=$((2 * expected_seconds))
  part_began=$SECONDS
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
    figure "time of $part" "$((SECONDS - part_began)) s" "$expected_seconds s expected" met
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
