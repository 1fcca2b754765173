#!/usr/bin/env bash
# Writes the API reference to build/docs/html: the public headers, by Doxygen. Warnings are errors.
set -euo pipefail
cd "$(dirname "$0")/.."

headers=(include/zeropage/*.h include/zeropage/data/*.h include/zeropage/text/*.h)
mkdir -p build
{ cat docs/Doxyfile; echo "INPUT = docs/reference.md ${headers[*]}"; } | doxygen -
echo "docs: $PWD/build/docs/html/index.html describes ${#headers[@]} headers"
