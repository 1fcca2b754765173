#!/usr/bin/env python3
"""Trains train_gpt with several optimizers, each with the best learning rate of a small grid, and draws their losses.

  bench/optimizer_curves.py --picture docs/optimizer_curves.svg

Each optimizer's grid is three rates, a factor of --spread apart, and more while the best is at an end. They are compared after --grid-steps steps, by the loss on text that was
held out; the best one is trained for --steps. All runs have the same seed, samples and warm-up. The default model has 25 M parameters
and takes about half an hour of a core. Exit status: 0 measured; 1 a run failed; 2 the command line is wrong; 128 + n stopped by signal n."""

import argparse
import copy
import statistics
import sys
import tempfile
from pathlib import Path

from peers import flags
from report import print_table
from runs import add_measuring_flags, add_train_gpt_flag, check_files, check_measuring_flags, data_in, measure, train_gpt_of, write_figures

# The middle of the grid.
RATES = {"adamw": 4e-4, "muon": 1.28e-3, "lamb": 1e-2, "adafactor": 3e-2}
COLOURS = {"adamw": "#4060a0", "muon": "#b04040", "lamb": "#508040", "adafactor": "#a07020"}
DEFAULTS = {"ranks": 1, "d_model": 512, "layers": 8, "heads": 8, "sequence": 128, "batch": 2, "steps": 300, "threads": 1}
# Steps whose mean is a point of a curve.
SMOOTHED = 10


def parse_arguments(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", default="adamw,muon", help=f"comma-separated, of {', '.join(RATES)} (default adamw,muon)")
    parser.add_argument("--grid-steps", type=int, default=30, help="steps after which rates are compared (default 30)")
    parser.add_argument("--spread", type=float, default=2.5, help="factor between two rates of the grid (default 2.5)")
    parser.add_argument("--warmup-steps", type=int, default=10, help="first steps, in which the rate rises (default 10)")
    add_train_gpt_flag(parser)
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draws the curves")
    flags.add_run_flags(parser, leave_out=["lr"], **DEFAULTS)
    add_measuring_flags(parser, "rate", rounds=1)
    arguments = parser.parse_args(words)
    flags.check_run_flags(parser, arguments)
    check_measuring_flags(parser, arguments)
    if arguments.rounds != 1:
        parser.error("--rounds: each run is made once; leave it out")
    arguments.lr = None  # a run has its own
    arguments.optimizers = list(dict.fromkeys(arguments.optimizers.split(",")))
    for name in arguments.optimizers:
        if name not in RATES:
            parser.error(f"--optimizers {name}: expected some of {', '.join(RATES)}")
    arguments.train_gpt = train_gpt_of(arguments)
    return arguments


def run(name, rate, steps, folder, data, arguments):
    """The losses of training, and the held-out one."""
    of_run = copy.copy(arguments)
    of_run.steps, of_run.lr = steps, rate
    command = [arguments.train_gpt.resolve(), "--data", data, *flags.command_line(of_run, name),
               "--warmup-steps", str(arguments.warmup_steps)]
    result = measure(f"{name} at {rate:g}", command, folder, arguments.timeout,
                     lambda of: {"loss": of["loss"], "held_out_loss": of["held_out_loss"], "parameters": of["parameters"],
                                 "step_seconds": statistics.median(of["step_seconds"])})
    print(f"{name}, rate {rate:g}, {steps} steps: held-out loss {result['held_out_loss']:.4f}, "
          f"{result['step_seconds']:.2f} s a step", file=sys.stderr, flush=True)
    return result


def figures_of(folder, data, arguments):
    """optimizer -> its grid, its best rate and the run with it."""
    figures = {}
    for name in arguments.optimizers:
        def loss_at(power, name=name):
            rate = RATES[name] * arguments.spread ** power
            return run(name, rate, arguments.grid_steps, folder, data, arguments)["held_out_loss"]

        losses = {power: loss_at(power) for power in (-1, 0, 1)}
        while (best := min(losses, key=losses.get)) in (min(losses), max(losses)):
            beyond = best + (1 if best > 0 else -1)
            losses[beyond] = loss_at(beyond)
        rate = RATES[name] * arguments.spread ** best
        grid = {f"{RATES[name] * arguments.spread ** power:g}": losses[power] for power in sorted(losses)}
        figures[name] = {"grid": grid, "rate": rate, **run(name, rate, arguments.steps, folder, data, arguments)}
    return figures


def smoothed(losses):
    """(middle of the steps, mean) of each SMOOTHED steps."""
    return [(first + SMOOTHED / 2, statistics.mean(losses[first:first + SMOOTHED]))
            for first in range(0, len(losses) - SMOOTHED + 1, SMOOTHED)]


def picture_of(figures, steps):
    """An SVG: losses over steps."""
    width, height, left, bottom, top = 640, 360, 56, 44, 16
    curves = {name: smoothed(of["loss"]) for name, of in figures.items()}
    losses = [loss for curve in curves.values() for _, loss in curve]
    low, high = min(losses), max(losses)

    def x(step):
        return left + (width - left - 16) * step / steps

    def y(loss):
        return top + (height - top - bottom) * (high - loss) / (high - low)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
             f'<rect width="{width}" height="{height}" fill="#ffffff"/>']
    for index in range(6):
        loss = low + (high - low) * index / 5
        parts.append(f'<line x1="{left}" y1="{y(loss):.1f}" x2="{width - 16}" y2="{y(loss):.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y(loss) + 4:.1f}" text-anchor="end" fill="#444444">{loss:.2f}</text>')
        step = round(steps * index / 5)
        parts.append(f'<text x="{x(step):.1f}" y="{height - bottom + 18}" text-anchor="middle" fill="#444444">{step}</text>')
    parts.append(f'<text x="{(left + width) / 2:.0f}" y="{height - 8}" text-anchor="middle" fill="#444444">step</text>')
    for index, (name, curve) in enumerate(curves.items()):
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in curve)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        words = f"{name}, rate {figures[name]['rate']:g}"
        parts.append(f'<text x="{width - 24}" y="{top + 16 + 18 * index}" text-anchor="end" fill="{COLOURS[name]}">{words}</text>')
    return "\n".join([*parts, "</svg>", ""])


def print_figures(figures, arguments):
    first = next(iter(figures.values()))
    print(f"\n{first['parameters'] / 1e6:.1f} M parameters, {arguments.batch} x {arguments.sequence} tokens a step, {arguments.steps} steps; "
          f"rates compared after {arguments.grid_steps}\n")
    last = min(arguments.steps, 20)
    rows = [("optimizer", "held-out losses of the grid", "rate", f"last {last} steps", "held-out loss", "s a step")]
    for name, of in figures.items():
        grid = ", ".join(f"{rate}: {loss:.3f}" for rate, loss in of["grid"].items())
        rows.append((name, grid, f"{of['rate']:g}", f"{statistics.mean(of['loss'][-last:]):.4f}", f"{of['held_out_loss']:.4f}",
                     f"{of['step_seconds']:.2f}"))
    print_table(rows)


def main(words=None):
    arguments = parse_arguments(words)
    check_files([arguments.train_gpt], arguments.data)
    with tempfile.TemporaryDirectory(prefix="optimizer-curves-") as folder:
        figures = figures_of(Path(folder), data_in(Path(folder), arguments.data), arguments)
    print_figures(figures, arguments)
    if arguments.picture is not None:
        arguments.picture.write_text(picture_of(figures, arguments.steps))
    if arguments.json is not None:
        write_figures(arguments.json, arguments, ["grid_steps", "spread", "warmup_steps"], "optimizers", figures, {})


if __name__ == "__main__":
    main()
