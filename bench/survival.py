#!/usr/bin/env python3
"""Kills random ranks of train_gpt at random moments under `zp run --restarts`, and compares the weights at the end with those of a run that
nothing happens to. With --cost: what copies cost a step, in interleaved runs."""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import peer_venv
from runs import add_train_gpt_flag, check_files, train_gpt_of

MODEL = ["--d-model", "64", "--layers", "2", "--sequence", "64", "--batch", "4", "--dropout", "0.1"]


def ranks_of(launcher):
    """Process ids by rank, of the ranks that a launcher has now."""
    found = {}
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    for pid in children.read_text().split():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for entry in environment:
            if entry.startswith(b"RANK="):
                found[int(entry[5:])] = int(pid)
    return found


def start(arguments, stage, json_path, flags, restarts):
    command = [str(arguments.build / "tools/zp"), "run", "-n", str(arguments.ranks)]
    if restarts:
        command += ["--restarts", str(restarts)]
    command += ["--", str(train_gpt_of(arguments)), "--stage", str(stage), "--steps", str(arguments.steps), "--threads", "1",
                "--json", str(json_path), *flags]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def result(process, json_path, timeout, killed=False):
    """Its figures. killed: a rank that dies when training has ended makes the launcher fail, and loses nothing."""
    _, errors = process.communicate(timeout=timeout)
    had_ended = killed and process.returncode == 128 + signal.SIGKILL and json_path.exists()
    if process.returncode != 0 and not had_ended:
        sys.exit(f"error: {' '.join(process.args)} ended with {process.returncode}:\n{errors}")
    return json.loads(json_path.read_text())


def kill_trials(arguments, folder):
    flags = MODEL + ["--buddy-every", str(arguments.copy_every)]
    unbroken = {}
    seconds, restarts, trials = [], 0, 0
    generator = random.Random(arguments.seed)
    for trial in range(arguments.runs):
        stage = trial % 4
        json_path = folder / "run.json"
        if stage not in unbroken:
            begin = time.monotonic()
            unbroken[stage] = (result(start(arguments, stage, json_path, MODEL, 0), json_path, arguments.timeout)["weights_sha256"],
                               time.monotonic() - begin)
        expected, duration = unbroken[stage]
        victim, moment = generator.randrange(arguments.ranks), generator.uniform(0, 1.2 * duration)
        json_path.unlink()
        process = start(arguments, stage, json_path, flags, restarts=5)
        time.sleep(moment)
        ranks = ranks_of(process.pid) if process.poll() is None else {}
        if victim in ranks:
            os.kill(ranks[victim], signal.SIGKILL)
        try:
            figures = result(process, json_path, arguments.timeout, killed=victim in ranks)
        except subprocess.TimeoutExpired:
            process.kill()
            sys.exit(f"error: run {trial} (stage {stage}, rank {victim} killed after {moment:.2f} s) did not end in {arguments.timeout} s")
        if figures["weights_sha256"] != expected:
            sys.exit(f"error: run {trial} (stage {stage}, rank {victim} killed after {moment:.2f} s, seed {arguments.seed}) ended with "
                     f"other weights: {figures['restarts']}")
        trials += 1
        restarts += len(figures["restarts"])
        seconds += [restart["seconds"] for restart in figures["restarts"] if restart["seconds"] > 0]
        if arguments.verbose:
            print(f"run {trial}: stage {stage}, rank {victim} after {moment:.2f} s: {figures['restarts']}", flush=True)
    print(f"{trials} runs of {arguments.ranks} ranks, {arguments.steps} steps, stages 0 to 3; one rank killed in each: "
          f"{restarts} restarts, all weights those of the run without")
    if seconds:
        print(f"seconds from a rank's end until training goes on: median {statistics.median(seconds):.2f}, "
              f"longest {max(seconds):.2f}")


def cost(arguments, folder):
    model = ["--d-model", "256", "--layers", "4", "--deferred", "off"]
    ratios = []
    for _ in range(arguments.runs):
        means = {}
        for name, flags, restarts in (("without", model, 0),
                                      ("with", model + ["--buddy-every", str(arguments.copy_every)], 1)):
            json_path = folder / f"{name}.json"
            times = result(start(arguments, 1, json_path, flags, restarts), json_path, arguments.timeout)["step_seconds"][2:]
            # The mean: a copy every K steps has no part in a median.
            means[name] = statistics.mean(times)
        ratios.append(means["with"] / means["without"])
    print(f"a copy every {arguments.copy_every} steps: {statistics.median(ratios):.3f} of the time of a step without "
          f"(from {min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} pairs of runs)")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="runs, or with --cost pairs of them (default 20)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of a run (default 4)")
    parser.add_argument("--steps", type=int, default=200, help="steps of a run (default 200)")
    parser.add_argument("--copy-every", type=int, default=10, help="steps between copies (default 10)")
    parser.add_argument("--cost", action="store_true", help="compare step times with and without copies, and kill nothing")
    parser.add_argument("--seed", type=int, default=1, help="chooses victims and moments (default 1)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a run may take (default 300)")
    parser.add_argument("--verbose", action="store_true", help="a line for each run")
    parser.add_argument("--build", type=Path, default=peer_venv.ROOT / "build/release", help="folder of the build that has zp (default build/release)")
    add_train_gpt_flag(parser)
    arguments = parser.parse_args()
    check_files([train_gpt_of(arguments), arguments.build / "tools/zp"], None)
    with tempfile.TemporaryDirectory() as folder:
        (cost if arguments.cost else kill_trials)(arguments, Path(folder))


if __name__ == "__main__":
    main()
