#!/usr/bin/env bash
# Brings a Debian 12 machine to where the build starts: Debian packages, then .venv with LibTorch, oneTBB and safetensors.
# Idempotent: a second call finds everything in place and returns in well under a second.
#
#   scripts/setup.sh            what the build and the tests need
#   scripts/setup.sh --lint     the formatter and the linter too
#   scripts/setup.sh --fuzz     clang with its fuzzer and sanitizers too, for scripts/fuzz.sh and scripts/sanitize.sh --sample
#   scripts/setup.sh --browser  Chromium too, in which a test draws the page of a profile
#   scripts/setup.sh --docs     Doxygen too, for scripts/docs.sh
#   scripts/setup.sh --cluster  Slurm, munge and Open MPI too, for tests/cluster; with --cuda, torchrun starts from .venv
#   scripts/setup.sh --cuda     the CUDA libraries too (2.5 GB), to build the preset `cuda`; nvcc 13 must be there
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(cmake ninja-build ccache python3-venv libgtest-dev libcli11-dev nlohmann-json3-dev
          libhwloc-dev libssl-dev libbenchmark-dev liburing-dev libxxhash-dev
          libjpeg62-turbo-dev libpng-dev zlib1g-dev libpcre2-dev libutf8proc-dev libyaml-cpp-dev libspdlog-dev)
with_cuda='' with_cluster=''
for flag in "$@"; do
  case $flag in
    --lint) packages+=(clang-format clang-tidy) ;;
    --fuzz) packages+=(clang libclang-rt-dev) ;;
    --browser) packages+=(chromium) ;;
    --docs) packages+=(doxygen) ;;
    --cluster)
      packages+=(slurm-wlm munge openmpi-bin iproute2)
      with_cluster=yes ;;
    --cuda) with_cuda=yes ;;
    *) printf 'setup: %s: expected --lint, --fuzz, --browser, --docs, --cluster or --cuda\n' "$flag" >&2; exit 2 ;;
  esac
done

# LibTorch as PyPI ships it, without the 3 GB of CUDA libraries that only a GPU build loads.
# libtorch_cpu.so needs libcudart and libcupti to start, and nothing else of CUDA.
# safetensors (0.5 MB) is what tests compare our files with, and what is behind it (7 MB) what torch's Python side imports: tests
# compare the programs of examples/cookbook with it.
wheels=(torch==2.11.0 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85
        tbb-devel==2023.2.0 tbb==2023.2.0 safetensors==0.8.0
        typing-extensions==4.16.0 sympy==1.14.0 mpmath==1.3.0)

# What torch==2.11.0 itself requires of CUDA.
cuda_wheels=('cuda-toolkit[cublas,cudart,cufft,cufile,cupti,curand,cusolver,cusparse,nvjitlink,nvrtc,nvtx]==13.0.2'
             nvidia-cudnn-cu13==9.19.0.56 nvidia-cusparselt-cu13==0.8.0 nvidia-nccl-cu13==2.28.9
             nvidia-nvshmem-cu13==3.4.5)

# What torchrun imports beside torch, whose Python side also loads the CUDA libraries.
torchrun_wheels=(typing-extensions==4.16.0)

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

install_debian_packages() {
  command -v dpkg-query >/dev/null || fail "this set-up knows Debian 12; elsewhere install these and rerun: ${packages[*]}"
  local missing=()
  for package in "${packages[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q '^install ok installed$' || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
      as_root=(sudo)
    else
      fail "these Debian packages are missing and this user may not install them. Run:
    sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}
then call make again."
    fi
  fi
  say "installing Debian packages: ${missing[*]}"
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

pip_install() {
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --progress-bar on "$@"
}

install_wheels() {
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is needed, found $(python3 --version)"
  local stamp=.venv/.zeropage-wheels wanted="${wheels[*]}"
  [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
  say "installing LibTorch 2.11.0, oneTBB and safetensors into .venv (1.3 GB, about a minute)"
  python3 -m venv .venv
  pip_install --no-deps "${wheels[@]}"
  printf '%s' "$wanted" >"$stamp"
}

install_cuda_wheels() {
  command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ] ||
    fail "no nvcc on PATH or in /usr/local/cuda/bin; install NVIDIA's CUDA 13.0 toolkit (not in Debian's registry), then rerun"
  local stamp=.venv/.zeropage-cuda-wheels wanted="${cuda_wheels[*]}"
  [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
  say "installing the CUDA libraries of LibTorch 2.11.0 into .venv (2.5 GB, about a minute)"
  # pip warns of what torch's Python side misses; nothing of it is used.
  pip_install "${cuda_wheels[@]}" 2> >(grep -v 'torch 2.11.0 requires\|dependency resolver' >&2)
  printf '%s' "$wanted" >"$stamp"
}

install_torchrun_wheels() {
  local stamp=.venv/.zeropage-torchrun-wheels wanted="${torchrun_wheels[*]}"
  [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
  say "installing what torchrun imports into .venv"
  pip_install --no-deps "${torchrun_wheels[@]}"
  printf '%s' "$wanted" >"$stamp"
}

install_debian_packages
install_wheels
[ -z "$with_cuda" ] || install_cuda_wheels
[ -z "$with_cluster" ] || install_torchrun_wheels
