#!/usr/bin/env python3
"""Measures our fused AdamW on the host against DeepSpeedCPUAdam and PyTorch's fused and foreach AdamW: one flat fp32
parameter, the same threads, in interleaved runs. Exit status: 0 measured, whatever the ratios; 1 a run failed; 2 the
command line is wrong; 128 + n stopped by signal n."""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import peer_venv
from against_peers import BASE_REQUIREMENTS, PEERS, PEERS_FOLDER
from report import print_table
from runs import check_files, in_turns, measure, median_step, spread

OPTIMIZERS = ("deepspeed", "fused", "foreach")
STEPS = 7  # of which the first two make the states
OURS = "fused AdamW"  # as optimizer_step calls it
OUR_ROUNDS = 5


def parse_arguments(words):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=2**26, help="elements (default %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each side "
                        "(default: as many as processors)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side (default 5)")
    parser.add_argument("--build", type=Path, default=peer_venv.ROOT / "build/release",
                        help="folder with bench/optimizer_step (default: build/release)")
    parser.add_argument("--json", type=Path, help="file for the figures of all rounds")
    parser.add_argument("--timeout", type=float, default=900, help="seconds a run may take, with "
                        "what DeepSpeed compiles in the first one (default 900)")
    arguments = parser.parse_args(words)
    for name in ("numel", "threads", "rounds", "timeout"):
        if not getattr(arguments, name) > 0:
            parser.error(f"--{name} must be above 0, got {getattr(arguments, name)}")
    return arguments


def our_seconds(result):
    return result["groups"][0]["seconds"][OURS]["median"]


def commands(arguments, python):
    """name -> (command, what reads its JSON)."""
    size = ["--numel", str(arguments.numel), "--threads", str(arguments.threads)]
    program = arguments.build / "bench/optimizer_step"
    ours = [program, *size, "--rounds", str(OUR_ROUNDS), "--tensors", "1"]
    # PyTorch's wheel finds ninja, which DeepSpeed compiles with, on the path only.
    path = f"PATH={python.parent}{os.pathsep}{os.environ['PATH']}"
    peer = ["env", path, python, PEERS_FOLDER / "optimizer_steps.py", *size, "--steps", str(STEPS)]
    sides = {"ours": (ours, our_seconds)}
    for optimizer in OPTIMIZERS:
        command = [*peer, "--optimizer", optimizer]
        sides[optimizer] = (command, lambda result: median_step(result, STEPS))
    return sides


def print_figures(arguments, seconds):
    print(f"\nAdamW in fp32, {arguments.numel} elements, {arguments.threads} threads, "
          f"{arguments.rounds} rounds\n")
    rows = [("", "step, ms", "it/ours", "min", "max")]
    for name, of_rounds in seconds.items():
        ratio = spread([it / ours for it, ours in zip(of_rounds, seconds["ours"])])
        cells = [f"{ratio[key]:.2f}" for key in ("median", "min", "max")]
        rows.append((name, f"{spread(of_rounds)['median'] * 1e3:.1f}", *cells))
    print_table(rows)
    print("\nit/ours: how many times as long as ours a step takes, the ratio within a round")


def main(words):
    arguments = parse_arguments(words)
    check_files([arguments.build / "bench/optimizer_step"], None)
    deepspeed = PEERS["deepspeed"]
    requirements = [*BASE_REQUIREMENTS, *deepspeed.requirements]
    python = peer_venv.ensure(requirements, deepspeed.install_environment)
    sides = commands(arguments, python)
    seconds = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as folder:
        for number, name in in_turns(list(sides), arguments.rounds):
            command, read = sides[name]
            seconds[name].append(measure(name, command, Path(folder), arguments.timeout, read))
            print(f"round {number}: {name} {seconds[name][-1] * 1e3:.1f} ms", file=sys.stderr)
    print_figures(arguments, seconds)
    if arguments.json:
        figures = {"numel": arguments.numel, "threads": arguments.threads, "seconds": seconds}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
