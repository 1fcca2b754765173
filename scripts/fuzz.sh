#!/usr/bin/env bash
# Fuzzes what reads state, models, tokenizers and tokens from disk, tests/fuzz/, with clang's libFuzzer under AddressSanitizer and
# UndefinedBehaviorSanitizer. Needs scripts/setup.sh --fuzz, and nothing of LibTorch.
#
#   scripts/fuzz.sh [SECONDS]    600 unless told, half of it for either fuzzer; exit 1 at the first finding, whose input is left in build/fuzz/
#
# What it learns stays in build/fuzz/corpus/ for the next call.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-600}
[[ $seconds =~ ^[1-9][0-9]*$ ]] || { printf 'fuzz: %s: expected a number of seconds\n' "$seconds" >&2; exit 2; }
command -v clang++ >/dev/null || { printf 'fuzz: no clang++; call scripts/setup.sh --fuzz\n' >&2; exit 1; }

mkdir -p build/fuzz/corpus build/fuzz/text_corpus
# Frame pointers: clang's fuzzer unwinds by them.
compile=(clang++ -std=c++20 -O1 -g -fno-omit-frame-pointer -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -Iinclude -I.)
run=(-max_total_time=$(((seconds + 1) / 2)) -max_len=16384 -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix=build/fuzz/)
"${compile[@]}" tests/fuzz/state_parser_fuzzer.cpp tests/fuzz/counted_allocations.cpp state/manifest.cpp state/safetensors.cpp state/block_checksums.cpp \
  state/detail/hash.cpp -o build/fuzz/state_parser_fuzzer
"${compile[@]}" tests/fuzz/text_parser_fuzzer.cpp text/*.cpp text/detail/*.cpp -lpcre2-8 -lutf8proc -o build/fuzz/text_parser_fuzzer
build/fuzz/state_parser_fuzzer "${run[@]}" -dict=tests/fuzz/state_parser.dict build/fuzz/corpus tests/fuzz/corpus
build/fuzz/text_parser_fuzzer "${run[@]}" build/fuzz/text_corpus tests/fuzz/text_corpus
