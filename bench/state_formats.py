#!/usr/bin/env python3
"""Trains train_gpt with its optimizer's states in each format, with the same seeds, and compares the losses on
text that was held out with those of fp32 states. Exit status: 0 measured; 1 a run failed; 2 the command line
is wrong; 128 + n stopped by signal n."""

import argparse
import copy
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from peers import flags
from report import MIB, print_table
from runs import (
    add_measuring_flags,
    add_train_gpt_flag,
    check_files,
    check_measuring_flags,
    data_in,
    in_turns,
    measure,
    train_gpt_of,
    write_figures,
)

BASELINE = "fp32"
FORMATS = (BASELINE, "bf16", "8bit")
CONFIDENCE = 0.95
# A run takes a minute or two on one core, and the loss halves.
DEFAULTS = {"ranks": 1, "d_model": 128, "layers": 2, "heads": 4, "sequence": 64, "batch": 8, "steps": 1000, "threads": 1,
            "lr": 1e-3}


@dataclass(frozen=True)
class Run:
    """One run of train_gpt, from its JSON file."""

    seed: int
    held_out_loss: float  # the mean over held_out_windows windows of text that no step saw, in nats a token
    first_loss: float  # of training
    held_out_windows: int
    state_bytes: int  # of all ranks


def parse_arguments(words):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default=f"{BASELINE},8bit", help="comma-separated: of "
                        f"{', '.join(FORMATS)}; fp32 is always trained (default {BASELINE},8bit)")
    flags.add_run_flags(parser, **DEFAULTS)
    parser.add_argument("--stage", type=int, choices=range(4), default=1,
                        help="ZeRO stage (default 1)")
    add_train_gpt_flag(parser)
    add_measuring_flags(parser, "format, each with the seed after the last one's", rounds=5)
    arguments = parser.parse_args(words)
    flags.check_run_flags(parser, arguments)
    check_measuring_flags(parser, arguments)
    if arguments.rounds < 2:
        parser.error(f"--rounds must be at least 2, or differences have no spread, got {arguments.rounds}")
    arguments.train_gpt = train_gpt_of(arguments)
    arguments.formats = list(dict.fromkeys([BASELINE, *arguments.formats.split(",")]))
    for name in arguments.formats:
        if name not in FORMATS:
            parser.error(f"--formats {name}: expected one of {', '.join(FORMATS)}")
    return arguments


def read_run(result, seed):
    return Run(
        seed=seed,
        held_out_loss=result["held_out_loss"],
        first_loss=result["loss"][0],
        held_out_windows=result["held_out_windows"],
        state_bytes=sum(rank["at_peak"]["optimizer_state"] for rank in result["memory"]),
    )


def run_rounds(folder, arguments):
    """format -> its runs, in the order of their seeds."""
    data = data_in(folder, arguments.data)
    runs = {name: [] for name in arguments.formats}
    for number, name in in_turns(arguments.formats, arguments.rounds):
        of_seed = copy.copy(arguments)
        of_seed.seed = arguments.seed + number - 1
        command = [arguments.train_gpt.resolve(), "--data", data, *flags.command_line(of_seed), "--stage",
                   str(arguments.stage), "--optimizer-state", name]
        run = measure(name, command, folder, arguments.timeout,
                      lambda result, seed=of_seed.seed: read_run(result, seed))
        runs[name].append(run)
        print(f"seed {run.seed} {name}: held-out loss {run.held_out_loss:.4f}", file=sys.stderr, flush=True)
    return runs


def students_t(degrees, confidence=CONFIDENCE):
    """How many standard errors to each side of a mean hold `confidence` of Student's distribution.

    >>> round(students_t(4), 3), round(students_t(1), 2), round(students_t(30), 3)
    (2.776, 12.71, 2.042)
    """
    scale = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))

    def within(width, cuts=2000):
        """By Simpson's rule, of the half above 0."""
        step = width / cuts
        heights = [(1 + (i * step) ** 2 / degrees) ** (-(degrees + 1) / 2) for i in range(cuts + 1)]
        total = heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])
        return 2 * scale * total * step / 3

    low, high = 0.0, 200.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < confidence else (low, middle)
    return low


def mean_and_half_width(values):
    """The mean of independent measurements, and how far its confidence interval goes to each side."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), students_t(len(values) - 1) * error


def figures_of(runs):
    """format -> its losses, and their differences from fp32's with the same seed."""
    figures = {}
    for name, of_format in runs.items():
        losses = [run.held_out_loss for run in of_format]
        mean, half_width = mean_and_half_width(losses)
        figures[name] = {"losses": losses, "mean": mean, "half_width": half_width,
                         "state_bytes": of_format[0].state_bytes}
        if name == BASELINE:
            continue
        differences = [run.held_out_loss - other.held_out_loss
                       for run, other in zip(of_format, runs[BASELINE], strict=True)]
        mean, half_width = mean_and_half_width(differences)
        figures[name]["difference"] = {"of_seeds": differences, "mean": mean, "half_width": half_width}
    return figures


def print_report(arguments, figures, runs):
    first = runs[BASELINE][0]
    model = ", ".join(f"{name} {getattr(arguments, name)}" for name in ("d_model", "layers", "sequence", "batch", "lr"))
    print(f"\n{model}, {arguments.steps} steps of AdamW in {arguments.compute_dtype} on {arguments.device}; seeds "
          f"{arguments.seed} to {arguments.seed + arguments.rounds - 1}; first training loss {first.first_loss:.2f}, "
          f"held-out loss over {first.held_out_windows} windows\n")
    rows = [("states", "MiB", *(f"seed {run.seed}" for run in runs[BASELINE]), "mean", "less fp32's",
             f"{CONFIDENCE:.0%} interval")]
    for name, of_format in figures.items():
        row = [name, f"{of_format['state_bytes'] / MIB:.2f}", *(f"{loss:.4f}" for loss in of_format["losses"]),
               f"{of_format['mean']:.4f}"]
        if name != BASELINE:
            difference = of_format["difference"]
            mean, half_width = difference["mean"], difference["half_width"]
            row += [f"{mean:+.4f}", f"{mean - half_width:+.4f} to {mean + half_width:+.4f}"]
        rows.append(tuple(row + [""] * (len(rows[0]) - len(row))))
    print_table(rows)


def main(words=None):
    arguments = parse_arguments(words)
    check_files([arguments.train_gpt], arguments.data)
    with tempfile.TemporaryDirectory(prefix="state-formats-") as folder:
        runs = run_rounds(Path(folder), arguments)
    figures = figures_of(runs)
    print_report(arguments, figures, runs)
    if arguments.json is not None:
        write_figures(arguments.json, arguments, ["formats", "stage", "rounds"], "formats", figures, runs)


if __name__ == "__main__":
    main()
