#!/usr/bin/env bash
# Packs the libraries that are not LibTorch into bundle/, so that the tree builds on a machine with g++, CMake, ninja
# and an installed torch 2.11.0 but no network. CMake takes from bundle/ what the system lacks.
set -euo pipefail
cd "$(dirname "$0")/.."

arch=$(gcc -print-multiarch 2>/dev/null || true)
libdir=/usr/lib/${arch:-$(uname -m)-linux-gnu}
rm -rf bundle
mkdir -p bundle/include bundle/lib

headers=(gtest gmock CLI nlohmann hwloc hwloc.h openssl benchmark liburing liburing.h xxhash.h
         jerror.h jmorecfg.h jpeglib.h libpng16 png.h pngconf.h pnglibconf.h zconf.h zlib.h yaml-cpp spdlog fmt pcre2.h utf8proc.h)
for header in "${headers[@]}"; do cp -rL "/usr/include/$header" bundle/include/; done
# Debian keeps what depends on the architecture apart.
for header in openssl hwloc jconfig.h; do
  [ -e "/usr/include/$arch/$header" ] && cp -rL "/usr/include/$arch/$header" bundle/include/
done
cp -rL .venv/include/tbb .venv/include/oneapi bundle/include/

cp -L "$libdir"/lib{gtest,gtest_main,gmock,crypto,uring,jpeg,png,z,pcre2-8,utf8proc,yaml-cpp}.a bundle/lib/
# The header of the NCCL that libtorch_cuda.so loads: an installed torch may come without it.
nccl=$(ls .venv/lib/python3*/site-packages/nvidia/nccl/include/nccl.h 2>/dev/null || true)
if [ -n "$nccl" ]; then cp -L $nccl bundle/include/; fi

# Debian has Google Benchmark as a shared library only, under a soname of its own.
cp -L "$libdir"/libbenchmark.so.1debian bundle/lib/
ln -sf libbenchmark.so.1debian bundle/lib/libbenchmark.so
cp -L "$libdir"/libspdlog.so.1.10 "$libdir"/libfmt.so.9 bundle/lib/
ln -sf libspdlog.so.1.10 bundle/lib/libspdlog.so
ln -sf libfmt.so.9 bundle/lib/libfmt.so
cp -L "$libdir"/libhwloc.so.15 bundle/lib/
ln -sf libhwloc.so.15 bundle/lib/libhwloc.so
for library in libtbb.so.12 libtbbmalloc.so.2; do
  cp -L ".venv/lib/$library" bundle/lib/
  ln -sf "$library" "bundle/lib/${library%.so.*}.so"
done

size=$(du -sm bundle | cut -f1)
[ "$size" -lt 60 ] || { echo "bundle: $size MB, expected less than 60" >&2; exit 1; }
echo "bundle: $size MB in bundle/; copy it beside the sources and configure as usual"
