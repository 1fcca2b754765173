#!/usr/bin/env python3
"""What a plan predicts, against what train_gpt measures: the ledger's peak, the bytes sent, the seconds of a step.

    python3 bench/plan_accuracy.py --models 25M --ranks 1,2,4 --stages 0,1,2,3 --json /tmp/accuracy.json

A cell is a model, a number of ranks, a stage, and checkpointing of blocks or none. Peak and bytes are forecast by the
simulated communicator, which runs the same program; seconds by `zp plan --seconds`, whose speeds of this machine are
measured once and cached. Peaks are compared without the communicator's own buffers, which no simulated world has.
Run it on an idle machine. Exit code 1: a peak is off by more than 3 %, bytes differ, or fewer than 80 % of the cells
have their seconds within 20 %.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

MODELS = {
    "3M": {"d-model": 256, "layers": 4, "heads": 4, "sequence": 128, "batch": 4},
    "25M": {"d-model": 512, "layers": 8, "heads": 8, "sequence": 128, "batch": 4},
    "85M": {"d-model": 768, "layers": 12, "heads": 12, "sequence": 128, "batch": 4},
}
VOCABULARY = 256
PAGE = "16MiB"
PEAK_WITHIN, SECONDS_WITHIN, CELLS_WITHIN = 0.03, 0.20, 0.80


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1) or (done.returncode == 1 and "nothing fits" not in done.stdout):
        if done.returncode != 0:
            sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def train(build, shape, ranks, stage, policy, steps, *more):
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "run.json"
        flags = [f for key, value in shape.items() for f in (f"--{key}", str(value))]
        run([build / "examples/train_gpt", *flags, "--ranks", str(ranks), "--stage", str(stage), "--steps", str(steps),
             "--threads", "1", "--checkpoint-activations", policy, "--page-bytes", PAGE, "--json", str(out), *more])
        return json.loads(out.read_text())


def predicted_seconds(build, shape, ranks):
    """By (stage, policy)."""
    model = (f"gpt:d={shape['d-model']},layers={shape['layers']},heads={shape['heads']},vocabulary={VOCABULARY},"
             f"positions={shape['sequence']}")
    plan = json.loads(run([build / "tools/zp", "plan", "--model", model, "--sequence", str(shape["sequence"]), "--batch",
                           str(shape["batch"]), "--world", str(ranks), "--page-bytes", PAGE, "--threads", "1",
                           "--seconds", "--json"]))
    return {(setting["stage"], setting["checkpoint"]): setting["seconds"]
            for setting in plan["settings"] if setting["offload_optimizer"] == "device"}


def without_staging(memory):
    return memory["peak_bytes"] - memory["at_peak"].get("staging", 0)


def sent(figures):
    return sum(value for key, value in figures["wire_bytes"][0].items() if key != "rank")


def cell(build, name, shape, ranks, stage, policy, seconds, steps):
    simulated = train(build, shape, ranks, stage, policy, steps, "--communicator", "simulated")
    real = train(build, shape, ranks, stage, policy, steps)
    measured = statistics.median(real["step_seconds"][1:])
    peak, forecast = without_staging(real["memory"][0]), without_staging(simulated["memory"][0])
    return {"model": name, "ranks": ranks, "stage": stage, "checkpoint": policy, "peak_bytes": peak,
            "forecast_peak_bytes": forecast, "peak_off": forecast / peak - 1, "wire_bytes": sent(real),
            "forecast_wire_bytes": sent(simulated), "seconds": measured, "predicted_seconds": seconds,
            "seconds_off": seconds / measured - 1}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path("build/release"))
    parser.add_argument("--models", default="25M,85M", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--policies", default="none,blocks")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    cells = []
    print("model ranks stage checkpoint       peak  forecast      wire      step  predicted")
    for name in options.models.split(","):
        shape = MODELS[name]
        for ranks in map(int, options.ranks.split(",")):
            predicted = predicted_seconds(options.build, shape, ranks)
            for stage in map(int, options.stages.split(",")):
                for policy in options.policies.split(","):
                    one = cell(options.build, name, shape, ranks, stage, policy, predicted[(str(stage), policy)],
                               options.steps)
                    cells.append(one)
                    wire = "exact" if one["wire_bytes"] == one["forecast_wire_bytes"] else "DIFFERS"
                    print(f"{name:5} {ranks:5} {stage:5} {policy:10} {one['peak_bytes'] / 2**20:6.1f} MiB "
                          f"{100 * one['peak_off']:+7.2f} % {wire:>9} {one['seconds']:7.3f} s "
                          f"{100 * one['seconds_off']:+7.1f} %", flush=True)
    peaks = max(abs(one["peak_off"]) for one in cells)
    exact = all(one["wire_bytes"] == one["forecast_wire_bytes"] for one in cells)
    timed = sum(abs(one["seconds_off"]) <= SECONDS_WITHIN for one in cells) / len(cells)
    print(f"{len(cells)} cells: peaks within {100 * peaks:.2f} %, bytes {'exact' if exact else 'DIFFER'}, "
          f"{100 * timed:.0f} % of the steps within {100 * SECONDS_WITHIN:.0f} %")
    if options.json:
        options.json.write_text(json.dumps(cells, indent=1))
    sys.exit(0 if peaks <= PEAK_WITHIN and exact and timed >= CELLS_WITHIN else 1)


if __name__ == "__main__":
    main()
