#!/usr/bin/env bash
# Builds what scripts/check_gpu.sh runs for sm_90 and packs it into carry/, which git ignores: for a machine that has a
# GPU and little time, and of libraries only torch 2.11.0 for CUDA. The programs look for the others beside them, and
# for LibTorch under carry/site-packages, a link that is made where they run (check_gpu.sh makes it).
#
#   scripts/carry.sh [--jobs N]
#
# Then it copies the folder elsewhere, beside a link to torch at another path, and checks with ldd that nothing is
# missing and nothing is found where this tree lies. Exit status: 0 packed and checked; 1 not, and why.
set -euo pipefail
cd "$(dirname "$0")/.."

jobs=$(nproc)
[ "${1:-}" != --jobs ] || jobs=${2:?carry: --jobs: expected a number}
most_mebibytes=64
programs=(examples/train_gpt bench/bare_loop bench/optimizer_step bench/gradient_pass
          tests/offload_test tests/cuda_test tests/comm_test tests/memory_test tests/train_gpt_cuda_test)
# What every machine that runs torch has.
system='lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|util)\.so\.|ld-linux|linux-vdso'
# "library => file" of what a program needs beside those.
needed() { env -u LD_LIBRARY_PATH ldd "$1" | awk '$2 == "=>" {print $1, $3}' | grep -vE "^$system"; }

cmake --preset carry >/dev/null
cmake --build --preset carry -j "$jobs" --target "${programs[@]##*/}"

rm -rf carry
for program in "${programs[@]}"; do
  mkdir -p "carry/$(dirname "$program")" carry/lib
  strip -o "carry/$program" "build/carry/$program"
done
packages=$(dirname "$(sed -n 's/^ZEROPAGE_TORCH_DIR:[^=]*=//p' build/carry/CMakeCache.txt)")
ln -s "$packages" carry/site-packages
# oneTBB lies where only this tree looks.
search=$(dirname "$(sed -n 's/^ZEROPAGE_TBB_LIBRARY:[^=]*=//p' build/carry/CMakeCache.txt)")
for program in "${programs[@]}"; do
  LD_LIBRARY_PATH=$search ldd "carry/$program" | awk '$2 == "=>" {print $1, $3}' | grep -vE "^$system" |
    grep -v "/site-packages/" || true
done | sort -u | while read -r name file; do
  [ -e "$file" ] || { echo "carry: $name: a program needs it, and it is nowhere" >&2; exit 1; }
  cp -L "$file" "carry/lib/$name"
  chmod u+w "carry/lib/$name"
  strip --strip-unneeded "carry/lib/$name"
done
rm carry/site-packages
scripts/check_cuda_runtime.sh carry/examples/train_gpt carry/tests/offload_test carry/bench/optimizer_step

size=$(du -sm carry | cut -f1)
[ "$size" -le $most_mebibytes ] || { echo "carry: $size MiB, expected at most $most_mebibytes; carry fewer programs" >&2; exit 1; }

elsewhere=$(mktemp -d)
trap 'rm -rf "$elsewhere"' EXIT
mkdir "$elsewhere/another-python"
ln -s "$packages"/torch "$packages"/nvidia "$elsewhere/another-python/"
cp -r carry "$elsewhere/carry"
ln -s ../another-python "$elsewhere/carry/site-packages"
for program in "${programs[@]}"; do
  missing=$(env -u LD_LIBRARY_PATH ldd "$elsewhere/carry/$program" | grep 'not found' || true)
  [ -z "$missing" ] || { echo "carry: $program, elsewhere: $missing" >&2; exit 1; }
  strangers=$(needed "$elsewhere/carry/$program" | grep -v " $elsewhere/carry/" || true)
  [ -z "$strangers" ] || { printf 'carry: %s, elsewhere, takes from this machine:\n%s\n' "$program" "$strangers" >&2; exit 1; }
done
symbols=$(for file in "${programs[@]/#/carry/}" carry/lib/*; do objdump -T "$file"; done |
  grep -oE '(GLIBC|GLIBCXX)_[0-9.]+' | sort -uV)
printf 'carry: %s programs and %s libraries, %s MiB; they need %s and %s, and beside carry/ only torch\n' \
  "${#programs[@]}" "$(find carry/lib -type f | wc -l)" "$size" \
  "$(grep '^GLIBC_' <<<"$symbols" | tail -n 1)" "$(grep '^GLIBCXX_' <<<"$symbols" | tail -n 1)"
