#!/usr/bin/env python3
"""Measures examples/train_resnet against PyTorch's DistributedDataParallel: the same ResNet-18, images, order, augmentation and initial
weights, in interleaved runs. Exit status: 0 measured, whatever the ratios; 1 a run failed, or the losses differ; 2 the command line is
wrong; 128 + n stopped by signal n."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import peer_venv
from against_peers import BASE_REQUIREMENTS, PEERS_FOLDER
from report import print_table
from runs import check_files, in_turns, measure, spread

LOSS_TOLERANCE = 1e-3  # relative, at the last step; sums over ranks and batches are made in another order


def parse_arguments(words):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="threads of a rank (default 1)")
    parser.add_argument("--stage", type=int, default=0, help="ours (default 0)")
    parser.add_argument("--steps", type=int, default=30, help="steps of a run, the first two not measured (default 30)")
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage (default 16)")
    parser.add_argument("--batch", type=int, default=64, help="samples of all ranks together (default 64)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side (default 3)")
    parser.add_argument("--data", type=Path, default=peer_venv.ROOT / "datasets/fashion-mnist")
    parser.add_argument("--build", type=Path, default=peer_venv.ROOT / "build/release")
    parser.add_argument("--json", type=Path, help="file for the figures of all rounds")
    parser.add_argument("--timeout", type=float, default=600, help="seconds a run may take (default 600)")
    arguments = parser.parse_args(words)
    if arguments.steps <= 2:
        parser.error(f"--steps must be above 2, the warm-up that is not measured, got {arguments.steps}")
    if arguments.ranks < 1 or arguments.batch % arguments.ranks != 0:
        parser.error(f"--batch {arguments.batch} cannot be shared by {arguments.ranks} ranks")
    return arguments


def commands(arguments, python):
    """name -> command; --json FILE is added to each."""
    names = ("threads", "steps", "width", "batch", "data")
    shared = [word for name in names for word in (f"--{name}", str(getattr(arguments, name)))]
    ours = [arguments.build / "examples/train_resnet", "--ranks", str(arguments.ranks), "--stage", str(arguments.stage),
            *shared]
    peer = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks),
            PEERS_FOLDER / "resnet_ddp.py", *shared]
    return {"ours": ours, "ddp": peer}


def step_and_loss(arguments, name):
    def read(result):
        if name == "ours":
            return arguments.batch / result["images_a_second"], result["loss"]
        return result["seconds"], result["loss"]

    return read


def main(words):
    arguments = parse_arguments(words)
    check_files([arguments.build / "examples/train_resnet"], None)
    if not arguments.data.is_dir():
        raise SystemExit(f"error: no folder at --data {arguments.data}; scripts/get_data.sh fashion-mnist")
    python = peer_venv.ensure(BASE_REQUIREMENTS, {})
    seconds, losses = {"ours": [], "ddp": []}, {"ours": [], "ddp": []}
    with tempfile.TemporaryDirectory() as folder:
        sides = commands(arguments, python)
        for number, name in in_turns(list(sides), arguments.rounds):
            step, loss = measure(name, sides[name], Path(folder), arguments.timeout, step_and_loss(arguments, name))
            seconds[name].append(step)
            losses[name].append(loss)
            print(f"round {number}: {name} {arguments.batch / step:.1f} images/s, loss {loss:.6f}", file=sys.stderr)
    print_figures(arguments, seconds, losses)
    if arguments.json:
        figures = {"flags": {key: str(value) for key, value in vars(arguments).items()}, "step_seconds": seconds, "losses": losses}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    worst = max(abs(ours - theirs) / theirs for ours, theirs in zip(losses["ours"], losses["ddp"]))
    print(f"losses at step {arguments.steps} differ by {worst:.1e} (tolerance {LOSS_TOLERANCE:g}, relative)")
    return 0 if worst <= LOSS_TOLERANCE else 1


def print_figures(arguments, seconds, losses):
    print(f"\nResNet-18 of width {arguments.width} on Fashion-MNIST, {arguments.ranks} ranks of {arguments.threads} threads, batch "
          f"{arguments.batch}, stage {arguments.stage}, {arguments.steps} steps, {arguments.rounds} rounds\n")
    rows = [("", "step, ms", "images/s", "ours/it", "min", "max", "loss")]
    for name, of_rounds in seconds.items():
        step = spread(of_rounds)["median"]
        ratio = spread([ours / it for ours, it in zip(seconds["ours"], of_rounds)])
        cells = [f"{ratio[key]:.3f}" for key in ("median", "min", "max")] if name != "ours" else [""] * 3
        rows.append((name, f"{step * 1e3:.1f}", f"{arguments.batch / step:.1f}", *cells, f"{losses[name][0]:.6f}"))
    print_table(rows)
    print("\nours/it: the ratio within a round: median, min, max")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
