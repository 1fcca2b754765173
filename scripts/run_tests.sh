#!/usr/bin/env bash
# Runs the tests of a preset, and ends with the cases that failed.
#
#   scripts/run_tests.sh [--strict] PRESET PLACES [CTEST_ARGUMENT ...]
#
# In a terminal it prints a line a test. Elsewhere it prints a line every 25 tests, so that a log's reader finds what failed.
#
# Where at most three tests fail they run again, alone. What passes then is told by name, with what failed at first: it is a defect of that
# test. build/PRESET/not_reliable.txt keeps that, and is not there otherwise.
#
# Without --strict the second run decides. With --strict, as in CI, the run fails
#
#   * if a test was ended by a signal, whatever it does alone: load delays what a program does, and does not make a right program crash;
#   * if a test fails in one of three runs alone. A test that fails every second time so passes one time in eight.
#
# A test that fails beside others and passes three times alone does not fail the run, but CI ends with what failed. Most such tests wait
# for deadlines of seconds, and on two cores another job can take both for as long, which is no fault of what is tested.
set -uo pipefail
cd "$(dirname "$0")/.."

most_run_again=3
runs_alone=1
strict=
if [ "${1:-}" = --strict ]; then
  strict=yes
  runs_alone=3
  shift
fi
preset=${1:?a preset of CMakePresets.json}
places=${2:?how many places, as for ctest -j}
shift 2
logs=build/$preset/Testing/Temporary
log=$logs/LastTest.log
failed=$logs/LastTestsFailed.log
not_reliable=build/$preset/not_reliable.txt

few_lines() {
  if [ -t 1 ]; then
    cat
  else
    awk '/^ +Start +[0-9]+: / { next }
         / \.\.\.+ +Passed +[0-9.]+ sec$/ { if (++passed % 25 == 0) { print passed " tests passed"; fflush() } next }
         { print; fflush() }'
  fi
}

# GoogleTest's reports of expectations, cases that failed, and what ended a process.
failed_cases() {
  awk '/^<end of output>/ { lines = 0 }
       /: Failure$/ { lines = 12 }
       /^crashed by / { lines = 40 }
       lines > 0 { print; --lines; next }
       /^\[  FAILED  \].*ms\)|^Test Timeout|SEGFAULT|terminate called|Sanitizer:/' "$log" | head -n 100
}
print_failed_cases() {
  printf '\nFailed cases (%s has all output):\n' "$log"
  failed_cases
}

rm -f "$not_reliable"
outcome=$(mktemp)
trap 'rm -f "$outcome"' EXIT
ctest --preset "$preset" -j "$places" "$@" | tee "$outcome" | few_lines && exit
print_failed_cases
[ -s "$failed" ] && [ "$(wc -l <"$failed")" -le "$most_run_again" ] || exit 1
# ctest's list at its end: "	 12 - name (SEGFAULT)".
verdicts=$(sed -n '/^The following tests FAILED:/,$p' "$outcome" | grep -E '^\s+[0-9]+ - ')
crashed=$(grep -vE '\((Failed|Timeout|Not Run)\)' <<<"$verdicts")
if [ -n "$strict" ] && [ -n "$crashed" ]; then
  printf '\nEnded by a signal:\n%s\n' "$crashed"
  exit 1
fi
at_first=$(echo "$verdicts"; failed_cases)
printf '\nAgain, alone:\n'
if ctest --preset "$preset" --rerun-failed --repeat "until-fail:$runs_alone"; then
  printf 'Not reliable, failed beside other tests and passed alone:\n%s\n' "$at_first" >"$not_reliable"
  printf '\n'
  cat "$not_reliable"
  exit
fi
print_failed_cases
exit 1
