#!/usr/bin/env bash
# Installs Zeropage and builds an outside project against the install tree alone, then runs it on two ranks.
set -euo pipefail
cd "$(dirname "$0")/.."

prefix=$PWD/build/install
rm -rf "$prefix" build/consumer
cmake --install build/release --prefix "$prefix" >/dev/null
cmake -S examples/consumer -B build/consumer -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_PREFIX_PATH="$prefix" -DZEROPAGE_TORCH_DIR="$(echo .venv/lib/python3*/site-packages/torch | xargs realpath)" >/dev/null
cmake --build build/consumer
"$prefix/bin/zp" run -n 2 -- build/consumer/consumer
