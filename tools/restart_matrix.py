#!/usr/bin/env python3
"""Resumes train_gpt from every (stage, ranks) at every other, after kill -9, and compares weights_sha256 with a run that never stopped.

    tools/restart_matrix.py                          256 moves in fp32
    tools/restart_matrix.py --compute-dtype bf16     and in bf16
    tools/restart_matrix.py --stages 0,3 --ranks 1,2

A run is killed when the state of half the steps is there. Between powers of two of ranks the global batch is the same and the runs are
world-invariant, so all have one hash. Three ranks are no power of two: from 3 to 3 the hash is that of 3 ranks; from 3 to another number,
and back, no run that never stopped does the same, and what is compared is the hash of two such moves from different stages.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = "--d-model 32 --layers 2 --heads 2 --sequence 32 --batch 2 --threads 1".split()
# Micro-batches a step: 4 ranks' with 1 each, or 3 ranks' with 1.
MICRO_BATCHES = 4


class Matrix:
    def __init__(self, arguments, folder):
        self.arguments = arguments
        self.folder = Path(folder)

    def flags(self, stage, ranks, like):
        """like: the number of ranks that the global batch is for."""
        flags = ["--stage", stage, "--ranks", ranks, "--compute-dtype", self.arguments.compute_dtype, *MODEL]
        if ranks == 3 or like == 3:
            return flags + ["--accumulate", 2]
        return flags + ["--accumulate", MICRO_BATCHES // ranks, "--world-invariant"]

    def run(self, flags, steps, more=()):
        out = self.folder / "out.json"
        command = [self.arguments.program, *flags, "--steps", steps, "--json", out, *more]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"restart_matrix: {' '.join(str(word) for word in command)}\n{done.stdout}{done.stderr}")
        return json.loads(out.read_text())["weights_sha256"]

    def saved(self, stage, ranks, like):
        """A state of half the steps, by a run that was killed once it was there."""
        folder = self.folder / f"stage-{stage}-ranks-{ranks}-like-{like}"
        state = folder / f"step-{self.arguments.steps // 2}"
        if state.exists():
            return state
        command = [self.arguments.program, *self.flags(stage, ranks, like), "--steps", 1000000, "--save", folder,
                   "--save-every", self.arguments.steps // 2, "--keep-last", 1000000]
        process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   start_new_session=True)
        while not state.exists():
            if process.poll() is not None:
                sys.exit(f"restart_matrix: {' '.join(str(word) for word in command)} ended with {process.returncode}")
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        return state

    def check(self):
        stages, ranks = self.arguments.stages, self.arguments.ranks
        settings = list(itertools.product(stages, ranks))
        expected, wrong, moves = {}, 0, 0
        for (stage, size), (to_stage, to_size) in itertools.product(settings, settings):
            like = 3 if 3 in (size, to_size) else size
            state = self.saved(stage, size, like)
            kind = "never stopped" if size == to_size or like != 3 else f"{size} to {to_size} ranks"
            key = (kind, to_size if like == 3 else 0)
            if key not in expected and kind == "never stopped":
                expected[key] = self.run(self.flags(stages[0], to_size, like), self.arguments.steps)
            found = self.run(self.flags(to_stage, to_size, like), self.arguments.steps, ["--resume", state])
            right = expected.setdefault(key, found) == found
            moves += 1
            wrong += not right
            print(f"stage {stage} on {size} -> stage {to_stage} on {to_size}: {found[:16]} "
                  f"{'as ' + kind if right else 'OTHER than ' + kind}", flush=True)
        print(f"{moves} moves in {self.arguments.compute_dtype}, {wrong} with other bits")
        return wrong == 0


def numbers(text):
    return [int(word) for word in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", default="build/release/examples/train_gpt", help="train_gpt [%(default)s]")
    parser.add_argument("--stages", type=numbers, default=[0, 1, 2, 3], help="[0,1,2,3]")
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 3, 4], help="[1,2,3,4]")
    parser.add_argument("--steps", type=int, default=40, help="in all; half of them before the kill [%(default)s]")
    parser.add_argument("--compute-dtype", default="fp32", choices=["fp32", "bf16"], help="[%(default)s]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="restart-matrix-") as folder:
        sys.exit(0 if Matrix(arguments, folder).check() else 1)


if __name__ == "__main__":
    main()
