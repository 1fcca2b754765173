#!/usr/bin/env bash
# Writes the API reference to build/docs/html: the public headers, by Doxygen. Warnings are errors.
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t headers < <(sed -nE 's#^ +([a-z_/0-9]+\.h)\)?$#\1#p' cmake/public_headers.cmake)
# What users meet through those: options that they fill in, and the base of their optimizer.
headers+=(checkpointing/activation_offload_options.h comm/launcher/launch_options.h offload/state_format.h zero/sharded_optimizer.h)
mkdir -p build
{ cat docs/Doxyfile; echo "INPUT = docs/reference.md ${headers[*]}"; } | doxygen -
echo "docs: $PWD/build/docs/html/index.html describes ${#headers[@]} headers"
