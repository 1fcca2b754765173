#!/usr/bin/env python3
"""Measures the ways in which train_gpt keeps activations until backward: memory, time and bits, in
interleaved runs. Exit status: 0 measured and all end with the same weights; 1 a run failed or the
weights differ; 2 the command line is wrong; 128 + n stopped by signal n."""

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from peers import flags
from report import MIB, print_table
from runs import (
    WARM_UP_STEPS,
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

# What the others are compared with.
NONE = "none"
BUDGET = "budget:"
OFFLOAD = "offload"
POLICIES = (NONE, "blocks", "every:sqrt", "selective", "budget:50%", "budget:30%", OFFLOAD)
GOALS = {"budget:50%": 1.08, "budget:30%": 1.20, "every:sqrt": 1.33}  # step time to that of NONE
# Blocks are most of the memory and time, and a round takes a minute or two on two cores.
DEFAULTS = {"ranks": 1, "layers": 12, "threads": 2, "batch": 4, "steps": 5}


@dataclass(frozen=True)
class Run:
    """One run of train_gpt, from its JSON file."""

    step_seconds: float  # median over the steps after the warm-up
    peak_bytes: int  # of activations, of the worst rank
    forecast_bytes: int  # of that peak, by the plan; None without one
    forward_flops: float  # on rank 0, of what may be computed again
    recomputed_flops: float
    weights_sha256: str


def parse_arguments(words):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", default=",".join(POLICIES), help="comma-separated, as "
                        "--checkpoint-activations has them, budget:N%% of the peak of none, or "
                        f"offload (to the host); none is always measured (default "
                        f"{','.join(POLICIES).replace('%', '%%')})")
    flags.add_run_flags(parser, **DEFAULTS)
    parser.add_argument("--stage", type=int, choices=range(4), default=0,
                        help="ZeRO stage (default 0)")
    add_train_gpt_flag(parser)
    add_measuring_flags(parser, "policy", rounds=3)
    arguments = parser.parse_args(words)
    flags.check_run_flags(parser, arguments)
    check_measuring_flags(parser, arguments)
    arguments.train_gpt = train_gpt_of(arguments)
    # None goes first: budgets are shares of its peak.
    arguments.policies = list(dict.fromkeys([NONE, *arguments.policies.split(",")]))
    for policy in arguments.policies:
        if policy.endswith("%") and not share_of(policy):
            parser.error(f"--policies {policy}: expected budget:N%, N from 1 to 100")
    return arguments


def share_of(policy):
    """Of the peak of NONE; 0 where the policy does not say it so."""
    number = policy.removeprefix(BUDGET).removesuffix("%")
    if policy != f"{BUDGET}{number}%" or not number.isdecimal() or int(number) > 100:
        return 0
    return int(number) / 100


def policy_flags(policy, peak_of_none):
    if policy == OFFLOAD:
        return ["--offload-activations", "host"]
    if share_of(policy):
        policy = f"{BUDGET}{int(share_of(policy) * peak_of_none)}"
    return ["--checkpoint-activations", policy]


def read_run(result, arguments):
    activations = result["activations"]
    return Run(
        step_seconds=median_step(result, arguments.steps),
        peak_bytes=activations["peak_bytes"],
        forecast_bytes=activations["predicted_peak_bytes"],
        forward_flops=activations["forward_flops"],
        recomputed_flops=activations["recomputed_flops"],
        weights_sha256=result["weights_sha256"],
    )


def run_rounds(folder, arguments):
    """policy -> its runs."""
    shared = [arguments.train_gpt.resolve(), "--data", data_in(folder, arguments.data),
              *flags.command_line(arguments), "--stage", str(arguments.stage)]
    runs = {policy: [] for policy in arguments.policies}
    for number, policy in in_turns(arguments.policies, arguments.rounds):
        peak_of_none = runs[NONE][0].peak_bytes if runs[NONE] else None
        run = measure(policy, [*shared, *policy_flags(policy, peak_of_none)], folder,
                      arguments.timeout, lambda result: read_run(result, arguments))
        runs[policy].append(run)
        print(
            f"round {number}/{arguments.rounds} {policy}: {run.step_seconds:.4f} s a step, "
            f"{run.peak_bytes / MIB:.1f} MiB",
            file=sys.stderr,
            flush=True,
        )
    return runs


def compare(of_policy, of_none, policy):
    """Figures of one policy; times from pairs of runs of the same round."""
    peak = statistics.median(run.peak_bytes for run in of_policy)
    last = of_policy[-1]
    return {
        "peak_bytes": peak,
        "share_of_none": peak / statistics.median(run.peak_bytes for run in of_none),
        "forecast_to_peak": last.forecast_bytes and last.forecast_bytes / last.peak_bytes,
        "step_seconds": statistics.median(run.step_seconds for run in of_policy),
        "step_time_to_none": spread(
            [a.step_seconds / b.step_seconds for a, b in zip(of_policy, of_none)]
        ),
        "goal": GOALS.get(policy),
        # Regions count what is in them, other policies all operators, and none nothing.
        "recomputed_share": last.forward_flops and last.recomputed_flops / last.forward_flops,
        "same_weights": len({run.weights_sha256 for run in [*of_policy, *of_none]}) == 1,
    }


def print_report(arguments, figures):
    names = ("ranks", "threads", "d_model", "layers", "heads", "sequence", "batch", "steps", "stage",
             "rounds")
    words = [f"{name} {getattr(arguments, name)}" for name in names]
    print(f"\n{', '.join(words)}, on {arguments.device} in {arguments.compute_dtype}\n")
    rows = [("", "peak, MiB", "of none's", "forecast/it", "step, s", "to none's", "min", "max",
             "goal", "FLOPs again", "same weights")]
    for policy, of_policy in figures.items():
        ratio = of_policy["step_time_to_none"]
        forecast = of_policy["forecast_to_peak"]
        rows.append((
            policy,
            f"{of_policy['peak_bytes'] / MIB:.1f}",
            f"{of_policy['share_of_none']:.3f}",
            f"{forecast:.3f}" if forecast else "",
            f"{of_policy['step_seconds']:.4f}",
            *(f"{ratio[key]:.3f}" for key in ("median", "min", "max")),
            f"{of_policy['goal']:.2f}" if of_policy["goal"] else "",
            f"{of_policy['recomputed_share']:.1%}",
            "yes" if of_policy["same_weights"] else "NO",
        ))
    print_table(rows)
    print("\npeak: of activations, the worst rank's; medians over rounds; to none's: the ratio of "
          "step times\nwithin a round; FLOPs again: of those in regions, or of all operators")


def main(words=None):
    arguments = parse_arguments(words)
    check_files([arguments.train_gpt], arguments.data)
    with tempfile.TemporaryDirectory(prefix="activation-policies-") as folder:
        runs = run_rounds(Path(folder), arguments)
    figures = {policy: compare(of_policy, runs[NONE], policy)
               for policy, of_policy in runs.items()}
    print_report(arguments, figures)
    if arguments.json is not None:
        write_figures(arguments.json, arguments, ("rounds", "stage"), "policies", figures, runs)
    return 0 if all(of_policy["same_weights"] for of_policy in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
