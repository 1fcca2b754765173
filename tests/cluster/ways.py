#!/usr/bin/env python3
"""Runs train_resnet in every way that there is to start its ranks, prints the table of all, and compares the weights.

    scripts/get_data.sh fashion-mnist
    tests/cluster/ways.py                                  1, 2 and 4 ranks, stages 0 and 3, 30 steps each
    tests/cluster/ways.py --ranks 2 --stages 3 --steps 10 --width 8

Ways that share their number of ranks must have the same weights and losses, at every stage; the exit code is 1 where they have not. A
launcher that this machine lacks is left out, and said so.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import programs
import slurm


def ways(ranks, running_slurm, torchrun):
    """Name -> (what is put in front of train_resnet, flags, variables). running_slurm, torchrun: None without."""
    found = {
        "threads": ([], ["--ranks", ranks, "--as-threads"], {}),
        "processes": ([], ["--ranks", ranks], {}),
        "zp run": (programs.zp_run(ranks, []), [], {}),
    }
    if not programs.why_no_mpirun():
        found["Open MPI"] = (["mpirun", "-n", str(ranks), "--bind-to", "none"], [], {})
    if torchrun is not None:
        found["torchrun"] = ([*torchrun, "--standalone", "--no-python", "--nproc-per-node", str(ranks)], [], {})
    if running_slurm is not None:
        nodes = min(ranks, len(running_slurm.nodes))
        # Both nodes are this machine, so their names have no addresses.
        variables = {"SLURM_CONF": running_slurm.environment["SLURM_CONF"], "MASTER_ADDR": "127.0.0.1"}
        found["Slurm"] = (["srun", f"-N{nodes}", f"--ntasks-per-node={ranks // nodes}"], [], variables)
    return found


def run_all(ranks_and_stages, flags, running_slurm, torchrun, table):
    """Runs every way; table: a file that train_resnet adds a line a run to. Returns the runs as train_resnet wrote them, and the last
    table that was printed."""
    printed = ""
    for ranks, stage in ranks_and_stages:
        for before, more, variables in ways(ranks, running_slurm, torchrun).values():
            command = [*before, *programs.train_resnet("--stage", stage, "--table", table, *more, *flags)]
            printed = programs.run(command, programs.environment(**variables), timeout=600)
    runs = [json.loads(line) for line in Path(table).read_text().splitlines()]
    return runs, printed[printed.index("ranks   "):printed.index("weights_sha256")]


def unlike(runs):
    """Runs whose weights or losses are not those of the first with as many ranks."""
    first = {}
    others = []
    for run in runs:
        expected = first.setdefault(run["way"].split()[0], run)
        if (run["weights_sha256"], run["loss"]) != (expected["weights_sha256"], expected["loss"]):
            others.append(run)
    return others


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--stages", default="0,3")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64, help="samples of a step, over all ranks")
    parser.add_argument("--data", default=programs.ROOT / "datasets" / "fashion-mnist")
    arguments = parser.parse_args()
    flags = ["--steps", arguments.steps, "--width", arguments.width, "--batch", arguments.batch, "--data", arguments.data,
             "--threads", 1]
    settings = [(int(ranks), int(stage)) for ranks in arguments.ranks.split(",") for stage in arguments.stages.split(",")]
    torchrun, why_no_torchrun = programs.find_torchrun()
    for reason in (why_no_torchrun, programs.why_no_mpirun(), slurm.why_not()):
        if reason:
            print(f"left out: {reason}")
    with tempfile.TemporaryDirectory(prefix="zeropage-ways-") as folder:
        table = Path(folder) / "runs.jsonl"
        if slurm.why_not():
            runs, printed = run_all(settings, flags, None, torchrun, table)
        else:
            with slurm.Slurm(nodes=2) as running:
                runs, printed = run_all(settings, flags, running, torchrun, table)
    print(printed, end="")
    others = unlike(runs)
    for run in others:
        print(f"unlike the others of as many ranks: {run['way']} at stage {run['stage']}")
    sys.exit(1 if others else 0)


if __name__ == "__main__":
    main()
