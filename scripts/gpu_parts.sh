# shellcheck shell=bash disable=SC2034,SC2154,SC2178,SC2128  # read by check_gpu.sh, which brings $built, $out, $devices, passes, tests, train and the rest
# The parts of scripts/check_gpu.sh, a function each.

device=cuda
small=(--d-model 512 --layers 8 --heads 8 --sequence 256 --batch 4)
# 1.2 and 6.4 G parameters, in the settings of a run that lasts. Their numbers are random at first, so the rate is low.
large=(--d-model 2048 --layers 24 --heads 16 --sequence 1024 --batch 8 --compute-dtype bf16 --lr 3e-5)
largest=(--d-model 4096 --layers 32 --heads 32 --sequence 1024 --batch 8 --compute-dtype bf16 --lr 3e-5)

# libraries PROGRAM: nothing that it needs is missing.
libraries() {
  ldd "$1" && ! ldd "$1" | grep 'not found'
}
export -f libraries

part_build() {
  local capability programs
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
  mapfile -t programs < <(scripts/carry.sh --programs)
  # Another compiler than this project's warns of other things.
  passes "configure" 60 cmake --preset cuda "-DCMAKE_CUDA_ARCHITECTURES=${capability:-90}" -DZEROPAGE_WERROR=OFF || return
  passes "build" 700 cmake --build --preset cuda -j "$(nproc)" --target "${programs[@]##*/}"
}

part_first() {
  passes "versions" 30 bash -c 'nvidia-smi; python3 --version; python3 -c "import torch; print(torch.__version__)"' || return
  passes "libraries" 30 bash -c "libraries $built/examples/train_gpt && libraries $built/tests/optim_test" || return
  train "three steps at stage 0" 60 "${small[@]}" --steps 3 --compute-dtype bf16 --stage 0 || return
  train "three steps at stage 3" 60 "${small[@]}" --steps 3 --compute-dtype bf16 --stage 3
  train "two ranks on one device" 60 "${small[@]}" --steps 3 --ranks 2 --stage 3
  return 0
}

part_mends() {
  tests "activations offloaded, 20 times" 100 "$built/tests/cuda_test" --gtest_filter='CudaActivationOffloadTest.*' --gtest_repeat=20 \
    --gtest_brief=1
  local limit model=(--d-model 256 --layers 4 --heads 4 --batch 64 --sequence 128 --compute-dtype bf16 --steps 5)
  for limit in 300MiB 600MiB 4GiB; do
    train "below a limit of $limit" 30 "${model[@]}" --device-memory $limit
    read_figures limits $limit "$out/below-a-limit-of-$limit.json"
  done
  tests "page-locked memory" 30 "$built/tests/base_memory_device_test" --gtest_filter='*Cuda*'
  tests "bits of NaN" 30 "$built/tests/optim_test" --gtest_filter='CudaCopyOutTest.*'
  return 0
}

part_small() {
  passes "optimizer step" 100 "$built/bench/optimizer_step" --device cuda --json "$out/optimizer_step.json"
  read_figures optimizer "$out/optimizer_step.json"
  return 0
}

part_memory() {
  local stage
  for stage in 0 3; do
    train "1.2 G parameters at stage $stage" 60 "${large[@]}" --steps 4 --stage $stage
  done
  local bare=$out/1.2-G-parameters-bare.json
  rm -f "$bare"
  passes "1.2 G parameters in the bare loop" 60 "$built/bench/bare_loop" --device $device "${large[@]}" --steps 4 --json "$bare"
  read_figures peaks "$bare" "$out/1.2-G-parameters-at-stage-"{0,3}.json
  return 0
}

# offloaded NAME SECONDS MICRO_BATCHES FLAGS...
offloaded() {
  train "$1, $3 micro-batches" "$2" --offload-optimizer host --offload-step backward --accumulate "$3" "${@:4}"
  read_figures offload "$out/${1//[^a-zA-Z0-9.]/-}--$3-micro-batches.json"
}
part_offload_1b() {
  offloaded "1.2 G parameters" 60 1 "${large[@]}" --stage 2 --steps 6
  offloaded "1.2 G parameters" 60 8 "${large[@]}" --stage 2 --steps 4
  return 0
}
part_offload_6b() {
  offloaded "6.4 G parameters" 240 8 "${largest[@]}" --stage 3 --checkpoint-activations blocks --steps 3
  offloaded "6.4 G parameters" 360 32 "${largest[@]}" --stage 3 --checkpoint-activations blocks --steps 3
  return 0
}

# Convolutions in fp32 too: rounded to TF32 their losses are soon as far apart as those of another order of images.
no_tf32=(env NVIDIA_TF32_OVERRIDE=0)
# image_run NAME DEVICE RANKS PAIRS...: five steps of train_imagenet, whose figures go to NAME.jsonl.
image_run() {
  local run=$out/images-$1
  rm -rf "$run" "$run.jsonl"
  passes "train_imagenet, $1" 40 "${no_tf32[@]}" "$built/examples/train_imagenet" --ranks "$3" OUT_DIR "$run" AUTO_RESUME false \
    DATA.TRAIN build/images/folders DATA.HELD_OUT 40 DATA.IMAGE_SIDE 64 MODEL.WIDTH 32 MODEL.SYNC_BATCH_NORM true TRAIN.STEPS 5 \
    TRAIN.BATCH 64 RUN.DEVICE "$2" RUN.REPORT_EVERY 1 "${@:4}"
  [ ! -f "$run/metrics.jsonl" ] || mv "$run/metrics.jsonl" "$run.jsonl"
}
part_images() {
  passes "images" 60 scripts/generated_images.py build/images || return
  image_run host cpu 1
  image_run one-rank $device 1
  image_run two-ranks $device 2 ZERO.STAGE 3
  image_run bf16 $device 2 ZERO.STAGE 3 ZERO.DTYPE bf16
  read_figures images "$out/images-"{host,one-rank,two-ranks}.jsonl
  read_figures images_bf16 "$out/images-"{host,bf16}.jsonl
  local where run resnet=("${no_tf32[@]}" "$built/examples/train_resnet" --data build/images/idx --steps 5 --width 16 --batch 64 --sync-batch-norm)
  for where in cpu $device; do
    passes "train_resnet on $where" 40 "${resnet[@]}" --device "$where" --json "$out/resnet-$where.json"
  done
  passes "train_resnet on two ranks" 40 "${resnet[@]}" --device $device --ranks 2 --stage 3 --json "$out/resnet-two-ranks.json"
  read_figures resnet "$out/resnet-"{cpu,$device,two-ranks}.json
  return 0
}

part_kernels() {
  tests "kernels against the host's bits" 120 "$built/tests/optim_test" --gtest_filter='*Cuda*-WithoutCuda*'
  tests "offload on the device" 120 "$built/tests/cuda_test"
  local between=':NcclRanksTest.*'
  [ "$(wc -l <<<"$devices")" -lt 2 ] || between=
  tests "NCCL and staging" 90 "$built/tests/comm_test" "--gtest_filter=*Nccl*-NoNccl*$between"
  [ -z "$between" ] || figure "NCCL between devices" "one device here" "two devices" UNCHECKED
  return 0
}

part_train_gpt() {
  tests "train_gpt as users run it" 240 env "TRAIN_GPT=$(realpath -m "$built")/examples/train_gpt" "$built/tests/train_gpt_cuda_test" \
    --gtest_filter='TrainGptCudaTest.*'
  local way
  for way in "--stage 3 --offload-optimizer host --offload-parameters host" "--offload-optimizer nvme:$out" \
    "--offload-activations host" "--offload-activations nvme:$out" "--checkpoint-activations blocks" \
    "--checkpoint-activations selective"; do
    # shellcheck disable=SC2086  # several flags
    train "three steps with $way" 60 "${small[@]}" --steps 3 $way
  done
  train "snapshot of the memory" 60 "${small[@]}" --steps 3 --memory-snapshot "$out/memory.pickle"
  return 0
}

# two_ranks NAME FLAGS...: short runs on one device, whose weights must be the same at all stages.
two_ranks() {
  local name=$1 stage
  shift
  for stage in 0 1 2 3; do
    train "two ranks $name $stage" 60 "${small[@]}" --ranks 2 --deterministic --stage $stage --steps 5 "$@"
  done
  read_figures weights "$out/two-ranks-$name"-{0,1,2,3}.json
}

part_ranks() {
  local dtype
  for dtype in bf16 fp32 fp16; do
    two_ranks $dtype --compute-dtype $dtype
    [ $dtype = fp16 ] || read_figures memory "$out/two-ranks-$dtype-3.json"
  done
  return 0
}

part_micro_batches() {
  # One order of sums at all stages.
  local each=(--accumulate 4 --reduce-micro-steps each)
  two_ranks bf16-accumulated --compute-dtype bf16 "${each[@]}" --clip-norm 1
  two_ranks bf16-stochastic --compute-dtype bf16 --low-precision-update stochastic
  two_ranks bf16-8bit --compute-dtype bf16 --low-precision-update split --optimizer-state 8bit
  two_ranks fp16-accumulated --compute-dtype fp16 "${each[@]}" --clip-norm 1
  return 0
}

# The same 16 samples a step, over other ranks.
part_meshes() {
  local mesh=("${small[@]}" --steps 5 --deterministic)
  train "mesh of one rank" 60 "${mesh[@]}" --accumulate 4 || return 0
  train "mesh tensor 2" 60 "${mesh[@]}" --ranks 2 --tensor 2 --accumulate 4
  train "mesh pipeline 2" 60 "${mesh[@]}" --ranks 2 --pipeline 2 --accumulate 4
  train "mesh zero-bubble" 60 "${mesh[@]}" --ranks 2 --pipeline 2 --schedule zero-bubble --accumulate 4
  train "mesh tensor 2 x data 2" 60 "${mesh[@]}" --ranks 4 --tensor 2 --stage 3 --accumulate 2
  train "mesh pipeline 2 x tensor 2" 60 "${mesh[@]}" --ranks 4 --pipeline 2 --tensor 2 --accumulate 4
  train "mesh shard within 2" 60 "${mesh[@]}" --ranks 4 --shard-within 2 --stage 3
  train "mesh data 4" 60 "${mesh[@]}" --ranks 4 --stage 3
  read_figures losses "$out/mesh-"{of-one-rank,tensor-2,pipeline-2,zero-bubble,tensor-2-x-data-2,pipeline-2-x-tensor-2,shard-within-2,data-4}.json
  return 0
}

part_states() {
  local states=$out/states run=("${small[@]}" --deterministic)
  rm -rf "$states"
  train "state not resumed" 60 "${run[@]}" --ranks 2 --stage 3 --steps 6
  train "state saved" 60 "${run[@]}" --ranks 2 --stage 3 --steps 3 --save "$states"
  train "state resumed by one rank" 60 "${run[@]}" --stage 1 --accumulate 2 --steps 6 --resume "$states"
  device=cpu train "state resumed on the host" 60 "${run[@]}" --stage 1 --accumulate 2 --steps 6 --resume "$states"
  read_figures losses "$out/state-"{not-resumed,resumed-by-one-rank,resumed-on-the-host}.json
  rm -rf "$states"
  passes "a killed rank is named within 5 s" 90 scripts/kill_a_rank.py 1 "$built/examples/train_gpt" --device $device "${small[@]}" \
    --ranks 2 --stage 3 --steps 3000 && [ -z "$dry" ] && cat "$out/a_killed_rank_is_named_within_5_s.log"
  return 0
}

# beside STAGE PEERS: 300 M parameters in bf16.
beside() {
  local run=$out/peers-stage$1.json
  passes "300 M at stage $1 beside $2" 450 python3 bench/against_peers.py --build "$built" --device $device --ranks 1 \
    --threads 4 --d-model 1024 --layers 24 --heads 16 --sequence 1024 --batch 8 --steps 16 --compute-dtype bf16 \
    --rounds 3 --stage "$1" --peers "$2" --json "$run"
  read_figures peers "$run"
  return 0
}
part_peers() { beside 0 bare,eager,compiled; }
part_fsdp2() { beside 3 bare,fsdp2; }

part_profiles() {
  local bench
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
  tests "compute-sanitizer memcheck" 360 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \
    --report-api-errors no --error-exitcode 9 "$built/tests/optim_test" "--gtest_filter=$kernels"
  tests "compute-sanitizer racecheck" 360 compute-sanitizer --tool racecheck --report-api-errors no --error-exitcode 9 \
    "$built/tests/optim_test" "--gtest_filter=$kernels"
  return 0
}
