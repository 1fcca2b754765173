#!/usr/bin/env python3
"""Measures train_gpt with experts, in interleaved rounds: experts over ranks, to which tokens travel, beside experts that stay
whole, whose weights travel; and a GPT of experts beside the dense one whose tokens meet as many weights of matrices. Exit status:
0 measured and losses agree; 1 a run failed or the losses of the same model differ; 2 the command line is wrong; 128 + n stopped
by signal n."""

import argparse
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
    median_step,
    spread,
    train_gpt_of,
    write_figures,
)

LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}
# Several seconds a run on two cores.
DEFAULTS = {"ranks": 2, "threads": 1, "layers": 4, "steps": 8}
TOKENS, WEIGHTS, DENSE = "tokens travel", "weights travel", "dense"


@dataclass(frozen=True)
class Run:
    """One run of train_gpt, from its JSON file."""

    step_seconds: float  # median over the steps after the warm-up
    tokens_per_second: float  # of all ranks, at that step
    sent_bytes: float  # a step, of the rank that sends most, without the broadcasts of wrapping
    peak_bytes: int  # on the ledger, of the worst rank, without the communicator's own buffers
    active_parameters: int  # that a token meets
    losses: tuple


def parse_arguments(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_run_flags(parser, leave_out=["batch"], **DEFAULTS)
    parser.add_argument("--experts", type=int, default=8, help="experts of each block (default 8)")
    parser.add_argument("--active", type=int, default=2, help="experts that each token is sent to (default 2)")
    parser.add_argument("--stages", default="1,3", help="ZeRO stages (default 1,3)")
    parser.add_argument("--batches", default="2,8", help="samples of a rank, a setting each (default 2,8)")
    add_train_gpt_flag(parser)
    add_measuring_flags(parser, "setting", rounds=3)
    arguments = parser.parse_args(words)
    flags.check_run_flags(parser, arguments)
    check_measuring_flags(parser, arguments)
    if arguments.ranks < 2:
        parser.error(f"--ranks must be at least 2, got {arguments.ranks}: experts are on all of them")
    for name in ("stages", "batches"):
        try:
            setattr(arguments, name, [int(word) for word in getattr(arguments, name).split(",")])
        except ValueError:
            parser.error(f"--{name} {getattr(arguments, name)}: expected numbers with commas between")
    arguments.batch = arguments.batches[0]  # each setting has its own
    arguments.train_gpt = train_gpt_of(arguments)
    return arguments


def settings_of(arguments):
    """(stage, samples of a rank, kind) -> its flags."""
    experts = ["--experts", str(arguments.experts), "--active", str(arguments.active)]
    kinds = {DENSE: [], WEIGHTS: experts, TOKENS: [*experts, "--expert-parallel", str(arguments.ranks)]}
    return {(stage, batch, kind): ["--stage", str(stage), "--batch", str(batch), *more]
            for stage in arguments.stages for batch in arguments.batches for kind, more in kinds.items()}


def read_run(result, arguments, batch):
    seconds = median_step(result, arguments.steps)
    of_rank = [sum(sent for operation, sent in of.items() if operation not in ("rank", "broadcast")) for of in result["wire_bytes"]]
    return Run(
        step_seconds=seconds,
        tokens_per_second=batch * arguments.ranks * arguments.sequence / seconds,
        sent_bytes=max(of_rank) / arguments.steps,
        peak_bytes=max(of["peak_bytes"] - of["at_peak"]["staging"] for of in result["memory"]),
        active_parameters=result.get("experts", result).get("active_parameters", result["parameters"]),
        losses=tuple(result["loss"]),
    )


def run_rounds(folder, arguments):
    """setting -> its runs."""
    shared = [arguments.train_gpt.resolve(), "--data", data_in(folder, arguments.data), *flags.command_line(arguments)]
    settings = settings_of(arguments)
    runs = {setting: [] for setting in settings}
    for number, setting in in_turns(list(settings), arguments.rounds):
        stage, batch, kind = setting
        name = f"stage {stage}, batch {batch}, {kind}"
        run = measure(name, [*shared, *settings[setting]], folder, arguments.timeout,
                      lambda result, of_batch=batch: read_run(result, arguments, of_batch))
        runs[setting].append(run)
        print(f"round {number}/{arguments.rounds} {name}: {run.step_seconds:.4f} s a step, "
              f"{run.sent_bytes / MIB:.1f} MiB sent", file=sys.stderr, flush=True)
    return runs


def ratios(of, beside, figure):
    return spread([getattr(one, figure) / getattr(other, figure) for one, other in zip(of, beside, strict=True)])


def loss_difference(of, beside):
    return max(abs(a - b) / abs(b) for one, other in zip(of, beside, strict=True)
               for a, b in zip(one.losses, other.losses, strict=True))


def figures_of(runs, arguments):
    figures = {}
    for stage in arguments.stages:
        for batch in arguments.batches:
            dense, weights, tokens = (runs[(stage, batch, kind)] for kind in (DENSE, WEIGHTS, TOKENS))
            figures[f"stage {stage}, batch {batch}"] = {
                "step_seconds": {kind: spread([run.step_seconds for run in runs[(stage, batch, kind)]])
                                 for kind in (DENSE, WEIGHTS, TOKENS)},
                "step_of_tokens_beside_weights": ratios(tokens, weights, "step_seconds"),
                "sent_bytes": {kind: runs[(stage, batch, kind)][0].sent_bytes for kind in (DENSE, WEIGHTS, TOKENS)},
                "peak_bytes": {kind: runs[(stage, batch, kind)][0].peak_bytes for kind in (DENSE, WEIGHTS, TOKENS)},
                "tokens_per_second": {kind: spread([run.tokens_per_second for run in runs[(stage, batch, kind)]])
                                      for kind in (DENSE, WEIGHTS, TOKENS)},
                "speed_of_weights_beside_dense": ratios(weights, dense, "tokens_per_second"),
                "speed_of_tokens_beside_dense": ratios(tokens, dense, "tokens_per_second"),
                "loss_difference": loss_difference(tokens, weights),
            }
    return figures


def in_words(ratio):
    return f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"


def print_figures(figures, runs, arguments):
    first = {kind: runs[(arguments.stages[0], arguments.batches[0], kind)][0] for kind in (DENSE, WEIGHTS)}
    print(f"\n{arguments.ranks} ranks, {arguments.threads} thread(s) a rank, on {arguments.device} in {arguments.compute_dtype}; d_model "
          f"{arguments.d_model}, {arguments.layers} blocks, {arguments.experts} experts, {arguments.active} of them a token; a token meets "
          f"{first[WEIGHTS].active_parameters} parameters, in the dense model {first[DENSE].active_parameters}\n")
    rows = [("", "tokens travel, s", "weights travel, s", "tokens/weights", "sent, MiB", "sent, MiB", "peak, MiB", "peak, MiB")]
    for name, of in figures.items():
        rows.append((name, f"{of['step_seconds'][TOKENS]['median']:.4f}", f"{of['step_seconds'][WEIGHTS]['median']:.4f}",
                     in_words(of["step_of_tokens_beside_weights"]), *(f"{of['sent_bytes'][kind] / MIB:.1f}" for kind in (TOKENS, WEIGHTS)),
                     *(f"{of['peak_bytes'][kind] / MIB:.1f}" for kind in (TOKENS, WEIGHTS))))
    print_table(rows)
    print("\ntokens a second of all ranks")
    rows = [("", "dense", "experts, weights", "beside dense", "experts, tokens", "beside dense")]
    for name, of in figures.items():
        rows.append((name, f"{of['tokens_per_second'][DENSE]['median']:.0f}",
                     f"{of['tokens_per_second'][WEIGHTS]['median']:.0f}", in_words(of["speed_of_weights_beside_dense"]),
                     f"{of['tokens_per_second'][TOKENS]['median']:.0f}", in_words(of["speed_of_tokens_beside_dense"])))
    print_table(rows)
    print("\nmedians over rounds; ratios are within a round: median (min to max)")


def main(words=None):
    arguments = parse_arguments(words)
    check_files([arguments.train_gpt], arguments.data)
    with tempfile.TemporaryDirectory(prefix="mixture-of-experts-") as name:
        runs = run_rounds(Path(name), arguments)
    figures = figures_of(runs, arguments)
    print_figures(figures, runs, arguments)
    if arguments.json:
        write_figures(arguments.json, arguments, ["experts", "active", "stages", "batches"], "settings", figures,
                      {f"stage {stage}, batch {batch}, {kind}": of for (stage, batch, kind), of in runs.items()})
    worst = max(of["loss_difference"] for of in figures.values())
    tolerance = LOSS_TOLERANCE[arguments.compute_dtype]
    print(f"losses where tokens and where weights travel differ by {worst:.1e} (tolerance {tolerance:g}, relative, at every step)")
    return 0 if worst <= tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
