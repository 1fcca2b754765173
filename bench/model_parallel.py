#!/usr/bin/env python3
"""Measures examples/model_parallel beside the same in PyTorch (peers/model_parallel.py), in interleaved rounds, and draws
both. Exit status: 0 measured; 1 a run failed; 2 the command line is wrong; 128 + n stopped by signal n."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import peer_venv
from runs import check_files, in_turns, measure

OURS = peer_venv.ROOT / "build/release/examples/model_parallel"
PEER = Path(__file__).resolve().parent / "peers/model_parallel.py"
REQUIREMENTS = (f"torch=={peer_venv.TORCH_VERSION}", "numpy", "torchvision==0.26.0")


def parse_arguments(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, meaning in (
        ("ranks", "2", "that the model is cut over"),
        ("threads", "1", "of a rank"),
        ("schedule", "gpipe", "gpipe or 1f1b, of the pipelined steps"),
        ("batch", "96", "images of a step"),
        ("split-sizes", "4,8,16,24,32,48", "images of a micro-batch"),
        ("image-side", "64", "pixels"),
        ("steps", "2", "that are measured, behind one that is not"),
    ):
        parser.add_argument(f"--{name}", default=default, help=f"{meaning} (default {default})")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side (default 3)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds a run may take (default 900)")
    parser.add_argument("--folder", type=Path, required=True, help="for ours.json, peer.json and chart.svg")
    arguments = parser.parse_args(words)
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {arguments.rounds}")
    if not arguments.folder.is_dir():
        parser.error(f"--folder {arguments.folder}: no such folder")
    return arguments


def added(figures, more):
    """The figures with those of another round."""
    if figures is None:
        return more
    for way, of_more in zip(figures["ways"], more["ways"], strict=True):
        way["images_per_second"] += of_more["images_per_second"]
        way["peak_bytes"] = max(way["peak_bytes"], of_more["peak_bytes"])
        way["loss"] = of_more["loss"]
    return figures


def main(words=None):
    arguments = parse_arguments(words)
    check_files([OURS], None)
    shared = ["--rounds", "1"]
    for name in ("ranks", "threads", "schedule", "batch", "split_sizes", "image_side", "steps"):
        shared += [f"--{name.replace('_', '-')}", getattr(arguments, name)]
    sides = {"ours": [OURS, *shared], "peer": [peer_venv.ensure(REQUIREMENTS, {}), PEER, *shared]}
    figures = dict.fromkeys(sides)
    with tempfile.TemporaryDirectory(prefix="model-parallel-") as name:
        for number, side in in_turns(list(sides), arguments.rounds):
            print(f"round {number}/{arguments.rounds} {side}", file=sys.stderr, flush=True)
            run = measure(side, sides[side], Path(name), arguments.timeout, lambda result: result)
            figures[side] = added(figures[side], run)
    files = {side: arguments.folder / f"{side}.json" for side in sides}
    for side, file in files.items():
        file.write_text(json.dumps(figures[side], indent=1) + "\n")
    drawn = ",".join(str(file) for file in files.values())
    chart = arguments.folder / "chart.svg"
    return subprocess.run([OURS, "--draw", drawn, "--svg", chart], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
