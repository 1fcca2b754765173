#!/usr/bin/env python3
"""Measures how well offloaded optimizer steps hide behind backward, in interleaved runs of train_gpt:
over links of four speeds, which a throttled copy engine stands for, and with the state on a disk.
Each is compared with what takes longest of its parts alone. Exit status: 0 measured and all end with
the same weights; 1 a run failed or the weights differ; 2 the command line is wrong; 128 + n stopped by
signal n."""

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

NONE = "none"
DISK = "nvme"
GOAL = 1.15  # step time to that of the longest part
BYTES_A_PARAMETER = 4  # in each direction, in fp32
# One core computes, one updates.
DEFAULTS = {"ranks": 1, "layers": 8, "threads": 1, "batch": 4, "steps": 6}


@dataclass(frozen=True)
class Run:
    """One run of train_gpt, from its JSON file."""

    step_seconds: float  # medians over the steps after the warm-up
    update_seconds: float
    parameters: int
    disk_seconds: float  # that moving the state takes alone; 0: it is on no disk
    weights_sha256: str


def parse_arguments(words):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transfers", default="0.25,0.5,1,4", help="comma-separated: how long the "
                        "link takes in one direction, as a share of forward and backward (default "
                        "0.25,0.5,1,4)")
    parser.add_argument("--nvme", type=Path, help="also: the state in this folder of a local disk")
    parser.add_argument("--step", choices=("step", "backward"), default="backward",
                        help="when updates are made (default backward)")
    parser.add_argument("--page-bytes", default="2MiB", help="the unit that is sent, updated and "
                        "sent back (default 2MiB)")
    flags.add_run_flags(parser, **DEFAULTS)
    parser.add_argument("--stage", type=int, choices=range(4), default=1,
                        help="ZeRO stage (default 1)")
    add_train_gpt_flag(parser)
    add_measuring_flags(parser, "setting", rounds=3)
    arguments = parser.parse_args(words)
    flags.check_run_flags(parser, arguments)
    check_measuring_flags(parser, arguments)
    if arguments.device != "cpu":
        parser.error("--device cuda: its link has a speed of its own; train_gpt there reports it")
    if arguments.compute_dtype != "fp32":
        parser.error("--compute-dtype: only fp32 here, whose bytes over the link are counted")
    try:
        arguments.transfers = [float(share) for share in arguments.transfers.split(",")]
    except ValueError:
        parser.error(f"--transfers {arguments.transfers}: expected numbers")
    if not all(share > 0 for share in arguments.transfers):
        parser.error("--transfers: expected numbers above 0")
    if arguments.nvme is not None and not arguments.nvme.is_dir():
        parser.error(f"--nvme {arguments.nvme}: no such folder")
    arguments.train_gpt = train_gpt_of(arguments)
    return arguments


def read_run(result, arguments):
    return Run(
        step_seconds=median_step(result, arguments.steps),
        update_seconds=statistics.median(result["update_seconds"][WARM_UP_STEPS:]),
        parameters=result["parameters"],
        disk_seconds=result.get("disk", {}).get("step_seconds", 0),
        weights_sha256=result["weights_sha256"],
    )


def seconds_of_compute(run):
    """Forward and backward."""
    return run.step_seconds - run.update_seconds


def bytes_of_link(arguments, run):
    """Of a rank, in each direction of its link, a step."""
    owners = arguments.ranks if arguments.stage > 0 else 1
    return BYTES_A_PARAMETER * run.parameters / owners


def transfer_name(share):
    return f"link {share:g}"


def setting_flags(setting, arguments, first_without):
    if setting == NONE:
        return []
    words = ["--offload-step", arguments.step, "--offload-threads", str(arguments.threads)]
    if setting == DISK:
        return [*words, "--offload-optimizer", f"nvme:{arguments.nvme}"]
    share = float(setting.split()[1])
    speed = bytes_of_link(arguments, first_without) / (share * seconds_of_compute(first_without))
    return [*words, "--offload-optimizer", "host", "--link-speed", str(int(speed))]


def run_rounds(folder, arguments):
    """setting -> its runs."""
    shared = [arguments.train_gpt.resolve(), "--data", data_in(folder, arguments.data),
              *flags.command_line(arguments), "--stage", str(arguments.stage), "--page-bytes",
              arguments.page_bytes]
    # None goes first: the links' speeds are shares of its time.
    settings = [NONE, *map(transfer_name, arguments.transfers)]
    if arguments.nvme is not None:
        settings.append(DISK)
    runs = {setting: [] for setting in settings}
    for number, setting in in_turns(settings, arguments.rounds):
        first_without = runs[NONE][0] if runs[NONE] else None
        command = [*shared, *setting_flags(setting, arguments, first_without)]
        run = measure(setting, command, folder, arguments.timeout,
                      lambda result: read_run(result, arguments))
        runs[setting].append(run)
        print(f"round {number}/{arguments.rounds} {setting}: {run.step_seconds:.4f} s a step",
              file=sys.stderr, flush=True)
    return runs


def parts_alone(setting, run, without, first_without):
    """part -> seconds a step, of a run and the one of its round with nothing offloaded."""
    parts = {"compute": seconds_of_compute(without), "update": without.update_seconds}
    if setting == DISK:
        parts["disk"] = run.disk_seconds
    else:
        # The speed was made from the first round.
        parts["link"] = float(setting.split()[1]) * seconds_of_compute(first_without)
    return parts


def compare(setting, of_setting, of_none):
    rounds = [parts_alone(setting, run, without, of_none[0])
              for run, without in zip(of_setting, of_none)]
    return {
        "step_seconds": statistics.median(run.step_seconds for run in of_setting),
        "parts_alone": {part: statistics.median(parts[part] for parts in rounds)
                        for part in rounds[0]},
        "to_longest_part": spread([run.step_seconds / max(parts.values())
                                   for run, parts in zip(of_setting, rounds)]),
        "to_sum_of_parts": statistics.median(run.step_seconds / sum(parts.values())
                                             for run, parts in zip(of_setting, rounds)),
        "goal": GOAL,
        "same_weights": len({run.weights_sha256 for run in [*of_setting, *of_none]}) == 1,
    }


def print_report(arguments, figures, link_bytes):
    names = ("ranks", "threads", "d_model", "layers", "heads", "sequence", "batch", "steps", "stage",
             "rounds")
    words = [f"{name} {getattr(arguments, name)}" for name in names]
    print(f"\n{', '.join(words)}, pages of {arguments.page_bytes}, --offload-step {arguments.step}")
    print(f"{link_bytes / MIB:.1f} MiB over a rank's link in each direction a step\n")
    rows = [("", "step, s", "compute", "update", "link, disk", "to longest", "min", "max", "to sum",
             "goal", "same weights")]
    for setting, of_setting in figures.items():
        parts, ratio = of_setting["parts_alone"], of_setting["to_longest_part"]
        reached = "yes" if ratio["median"] <= GOAL else "no"
        rows.append((
            setting,
            f"{of_setting['step_seconds']:.4f}",
            f"{parts['compute']:.4f}",
            f"{parts['update']:.4f}",
            f"{parts.get('link', parts.get('disk', 0)):.4f}",
            *(f"{ratio[key]:.3f}" for key in ("median", "min", "max")),
            f"{of_setting['to_sum_of_parts']:.3f}",
            f"{GOAL:.2f} {reached}",
            "yes" if of_setting["same_weights"] else "NO",
        ))
    print_table(rows)
    print("\nmedians over rounds; parts alone, seconds a step: compute and update of a run that "
          "offloads\nnothing, link by its bytes and speed, disk by what was measured before the run; "
          "to longest: the\nstep's time to that of the longest part; to sum: to all, one after the "
          "other")


def main(words=None):
    arguments = parse_arguments(words)
    check_files([arguments.train_gpt], arguments.data)
    with tempfile.TemporaryDirectory(prefix="offload-pipeline-") as folder:
        runs = run_rounds(Path(folder), arguments)
    figures = {setting: compare(setting, of_setting, runs[NONE])
               for setting, of_setting in runs.items() if setting != NONE}
    print_report(arguments, figures, bytes_of_link(arguments, runs[NONE][0]))
    if arguments.json is not None:
        write_figures(arguments.json, arguments,
                      ("rounds", "stage", "step", "page_bytes", "transfers"), "settings", figures,
                      runs)
    return 0 if all(of_setting["same_weights"] for of_setting in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
