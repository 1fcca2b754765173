#!/usr/bin/env python3
"""Kills one rank of a run that has made a step, and looks at how the run ends.

    kill_a_rank.py RANK COMMAND...    COMMAND starts ranks as its children, as `train_gpt --ranks 2` does

Prints the seconds that the others still lived, and the line that names the killed rank. Exit status: 0 the run ended within MOST_SECONDS
of the kill, with a failure, and named the rank; 1 it did not; 2 the command line is wrong.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MOST_SECONDS = 5
MOST_SECONDS_TO_A_STEP = 60


def children_of(parent):
    """Processes whose parent it is, in the order in which they were started."""
    children = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == parent:
            children.append((int(fields[19]), int(status.parent.name)))
    return [process for _, process in sorted(children)]


def wait_for_a_step(run, log):
    """Whether it has printed one before it ended."""
    end = time.monotonic() + MOST_SECONDS_TO_A_STEP
    while run.poll() is None and time.monotonic() < end:
        if re.search(r"^step ", log.read_text(errors="replace"), re.MULTILINE):
            return True
        time.sleep(0.05)
    return False


def fail(what, log):
    print(f"kill_a_rank: {what}; it printed:\n{log.read_text(errors='replace')[-2000:]}")
    return 1


def watch(rank, command, log):
    with open(log, "wb") as out:
        run = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        if not wait_for_a_step(run, log):
            return fail(f"no step within {MOST_SECONDS_TO_A_STEP} s", log)
        ranks = children_of(run.pid)
        if rank >= len(ranks):
            return fail(f"expected a child for rank {rank}, the run has {len(ranks)} children", log)
        os.kill(ranks[rank], signal.SIGKILL)
        killed = time.monotonic()
        try:
            status = run.wait(MOST_SECONDS_TO_A_STEP)
        except subprocess.TimeoutExpired:
            return fail(f"it still ran {MOST_SECONDS_TO_A_STEP} s after rank {rank} was killed", log)
        seconds = time.monotonic() - killed
    finally:
        run.kill()
        run.wait()
    named = [line for line in log.read_text(errors="replace").splitlines() if re.search(rf"\brank {rank}\b", line)]
    if status == 0 or not named:
        return fail(f"it ended with {status} and does not name rank {rank}", log)
    print(f"rank {rank} was killed; the others ended after {seconds:.2f} s, exit status {status}: {named[0]}")
    return 0 if seconds <= MOST_SECONDS else 1


def main():
    if len(sys.argv) < 3 or not sys.argv[1].isdigit():
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="kill-a-rank-") as folder:
        return watch(int(sys.argv[1]), sys.argv[2:], Path(folder) / "log")


if __name__ == "__main__":
    sys.exit(main())
