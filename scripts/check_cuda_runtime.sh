#!/usr/bin/env bash
# Checks that programs with kernels launch them by the shared CUDA runtime, which LibTorch uses too, and carry none of
# their own: a second one has streams, errors and settings that LibTorch does not see.
#
#   scripts/check_cuda_runtime.sh PROGRAM...
#
# Exit status: 0 all do; 1 one does not, and why.
set -euo pipefail
[ $# -gt 0 ] || { echo "check_cuda_runtime: expected programs" >&2; exit 1; }

for program in "$@"; do
  imported=$(nm -D --undefined-only "$program" | grep -oE 'cudaLaunchKernel(ExC)?\b' | sort -u | tr '\n' ' ' || true)
  if [ -z "$imported" ]; then
    echo "check_cuda_runtime: $program: expected to import cudaLaunchKernel or cudaLaunchKernelExC, and it imports neither;" \
      "is CMAKE_CUDA_RUNTIME_LIBRARY Static, or has it no kernel?" >&2
    exit 1
  fi
  runtimes=$(readelf -d "$program" | grep -c 'NEEDED.*libcudart\.so' || true)
  if [ "$runtimes" -ne 1 ]; then
    echo "check_cuda_runtime: $program: expected to need one libcudart.so, got $runtimes" >&2
    exit 1
  fi
  echo "$program: imports $imported"
done
