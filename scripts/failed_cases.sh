#!/usr/bin/env bash
# What failed in the last run of CTest, with its first lines: the run's own output has it far above.
#
#   scripts/failed_cases.sh BUILD_FOLDER
set -euo pipefail

log=${1:?a build folder}/Testing/Temporary/LastTest.log
printf '\nFailed cases (%s has all output):\n' "$log"
# GoogleTest's report of an expectation up to its next empty line, cases that failed, and what ended a process.
awk '/: Failure$/ { lines = 12 }
     lines > 0 { print; --lines; next }
     /^\[  FAILED  \].*ms\)|^Test Timeout|SEGFAULT|terminate called|Sanitizer:/' "$log" | head -n 100
exit 1
