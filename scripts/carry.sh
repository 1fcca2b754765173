#!/usr/bin/env bash
# Builds what scripts/check_gpu.sh runs for sm_90 and packs it into one archive, carry/zeropage.tar.xz, which git ignores: for a machine that
# has a GPU and little time, and of libraries only torch 2.11.0 for CUDA. check_gpu.sh unpacks it there. The programs look for the other
# libraries beside them, and for LibTorch under a link site-packages, which check_gpu.sh makes.
#
#   scripts/carry.sh [--jobs N] [--level 0...9]    builds the preset carry, packs and checks
#   scripts/carry.sh --built [--level 0...9]       packs and checks what build/carry has, however it was configured
#   scripts/carry.sh --programs                    what is packed, a line each
#
#   --level    of xz: 6; 0 takes an eighth of the time and a fourth more room
#
# Then it unpacks the archive elsewhere, beside a link to torch at another path, and checks with ldd that nothing is missing and nothing is
# found where this tree lies. An optimised build, which travels, must take at most 64 MiB. Exit status: 0 packed and checked; 1 not, and why;
# 2 the command line is wrong.
set -euo pipefail
cd "$(dirname "$0")/.."

programs=(examples/train_gpt examples/train_imagenet examples/train_resnet
          bench/bare_loop bench/optimizer_step bench/gradient_pass
          tests/optim_test tests/cuda_test tests/comm_test tests/base_memory_device_test tests/train_gpt_cuda_test)
jobs=$(nproc)
level=6
builds=yes
usage() { printf 'carry: %s; --help shows the command line\n' "$1" >&2; exit 2; }
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
    --programs) printf '%s\n' "${programs[@]}"; exit 0 ;;
    --built) builds= ;;
    --jobs) [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || usage "--jobs: expected a number, got ${2:-nothing}"; jobs=$2; shift ;;
    --level) [[ ${2:-} =~ ^[0-9]$ ]] || usage "--level: expected 0 to 9, got ${2:-nothing}"; level=$2; shift ;;
    *) usage "$1: expected --jobs N, --level N, --built or --programs" ;;
  esac
  shift
done

build=build/carry
staged=build/carry-staged
archive=carry/zeropage.tar.xz
most_mebibytes=64
# What every machine that runs torch has.
system='lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|util)\.so\.|ld-linux|linux-vdso'
# "library => file" of what a program needs beside those.
needed() { env -u LD_LIBRARY_PATH ldd "$1" | awk '$2 == "=>" {print $1, $3}' | grep -vE "^$system"; }
fail() { printf 'carry: %s\n' "$*" >&2; exit 1; }
cached() { sed -n "s/^$1:[^=]*=//p" "$build/CMakeCache.txt"; }

if [ -n "$builds" ]; then
  cmake --preset carry >/dev/null
  cmake --build --preset carry -j "$jobs" --target "${programs[@]##*/}"
fi
[ -f "$build/CMakeCache.txt" ] || fail "$build has no build; call scripts/carry.sh without --built"

started=$SECONDS
rm -rf "$staged" carry
mkdir -p "$staged/lib" carry
for program in "${programs[@]}"; do
  [ -x "$build/$program" ] || fail "$build/$program: is not built; build the target ${program##*/}, or call without --built"
  mkdir -p "$staged/$(dirname "$program")"
  strip -o "$staged/$program" "$build/$program"
done
packages=$(dirname "$(cached ZEROPAGE_TORCH_DIR)")
ln -s "$packages" "$staged/site-packages"
# oneTBB lies where only this tree looks.
search=$(dirname "$(cached ZEROPAGE_TBB_LIBRARY)")
for program in "${programs[@]}"; do
  LD_LIBRARY_PATH=$search ldd "$staged/$program" | awk '$2 == "=>" {print $1, $3}' | grep -vE "^$system" |
    grep -v "/site-packages/" || true
done | sort -u | while read -r name file; do
  [ -e "$file" ] || fail "$name: a program needs it, and it is nowhere"
  cp -L "$file" "$staged/lib/$name"
  chmod u+w "$staged/lib/$name"
  strip --strip-unneeded "$staged/lib/$name"
done
rm "$staged/site-packages"
scripts/check_cuda_runtime.sh "$staged"/{examples/train_gpt,tests/optim_test,bench/optimizer_step}

# The same files make the same archive. The dictionary sees all programs, which have the same library in them.
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -C "$staged" -cf - . |
  xz -T0 --x86 --lzma2="preset=$level,dict=64MiB" >"$archive.part"
mv "$archive.part" "$archive"
kibibytes=$(($(stat -c %s "$archive") / 1024))
build_type=$(cached CMAKE_BUILD_TYPE)
[ "$build_type" != Release ] || [ $kibibytes -le $((most_mebibytes * 1024)) ] ||
  fail "$archive: $((kibibytes / 1024)) MiB, expected at most $most_mebibytes; carry fewer programs"

elsewhere=$(mktemp -d)
trap 'rm -rf "$elsewhere"' EXIT
mkdir "$elsewhere/another-python" "$elsewhere/carried"
ln -s "$packages"/torch "$packages"/nvidia "$elsewhere/another-python/"
tar -C "$elsewhere/carried" -xf "$archive"
ln -s ../another-python "$elsewhere/carried/site-packages"
for program in "${programs[@]}"; do
  missing=$(env -u LD_LIBRARY_PATH ldd "$elsewhere/carried/$program" | grep 'not found' || true)
  [ -z "$missing" ] || fail "$program, elsewhere: $missing"
  strangers=$(needed "$elsewhere/carried/$program" | grep -v " $elsewhere/carried/" || true)
  [ -z "$strangers" ] || fail "$program, elsewhere, takes from this machine:
$strangers"
done
env -u LD_LIBRARY_PATH "$elsewhere/carried/examples/train_gpt" --help >/dev/null || fail "examples/train_gpt, elsewhere, does not start"
symbols=$(for file in "${programs[@]/#/$staged/}" "$staged"/lib/*; do objdump -T "$file"; done |
  grep -oE '(GLIBC|GLIBCXX)_[0-9.]+' | sort -uV)
printf 'carry: %s: %s programs and %s libraries of a %s build, %s KiB of %s MiB, in %s s; they need %s and %s, and beside them only torch\n' \
  "$archive" "${#programs[@]}" "$(find "$staged/lib" -type f | wc -l)" "$build_type" "$kibibytes" \
  "$(du -sm "$staged" | cut -f1)" "$((SECONDS - started))" \
  "$(grep '^GLIBC_' <<<"$symbols" | tail -n 1)" "$(grep '^GLIBCXX_' <<<"$symbols" | tail -n 1)"
