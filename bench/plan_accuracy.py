#!/usr/bin/env python3
"""Compares what `zp plan` forecasts with what train_gpt then holds and sends: the ledger's peak of rank 0, and the bytes that a step sends.
Exit status: 0 every peak is within --tolerance and every byte sent was forecast; 1 not so, or a run failed; 2 the command line is wrong;
128 + n stopped by signal n."""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import peer_venv
from report import MIB, print_table
from runs import check_files, data_in, measure

# (width, layers, heads): 25 and 85 million parameters.
MODELS = {"25M": (512, 8, 8), "85M": (768, 12, 12)}
VOCABULARY = 257  # train_gpt's: bytes and the end of a text
PAGE_BYTES = 16 * MIB
SEQUENCE = 128
POLICIES = ("none", "blocks")
# Of each run; the last step is one after the order of pages was recorded.
STEPS = (2, 3)
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")


@dataclass(frozen=True)
class Cell:
    """One setting."""

    model: str
    ranks: int
    stage: int
    policy: str

    def __str__(self):
        return f"{self.model}, {self.ranks} ranks, stage {self.stage}, checkpoint {self.policy}"


@dataclass(frozen=True)
class Figures:
    peak_bytes: int
    staging_bytes: int  # of the peak
    sent_bytes: int  # in one step


def numbers(text):
    return [int(word) for word in text.split(",")]


def parse_arguments(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)} (default all)")
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4], help="comma-separated (default 1,2,4)")
    parser.add_argument("--stages", type=numbers, default=[0, 1, 2, 3], help="comma-separated (default 0,1,2,3)")
    parser.add_argument("--batch", type=int, default=4, help="samples of a rank (default 4)")
    parser.add_argument("--tolerance", type=float, default=0.03, help="of peaks (default 0.03)")
    parser.add_argument("--build", type=Path, default=peer_venv.ROOT / "build/release", help="folder of the programs (default build/release)")
    parser.add_argument("--data", type=Path, help="file whose bytes are the tokens (default: LibTorch's headers)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds a run may take (default 900)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args(words)
    arguments.models = arguments.models.split(",")
    for name in arguments.models:
        if name not in MODELS:
            parser.error(f"--models {name}: expected some of {', '.join(MODELS)}")
    if not set(arguments.stages) <= set(range(4)):
        parser.error("--stages: expected some of 0,1,2,3")
    return arguments


def forecasts(arguments, model, ranks):
    """(stage, policy) -> Figures, by zp plan."""
    width, layers, heads = MODELS[model]
    command = [arguments.build / "tools/zp", "plan", "--json",
               "--model", f"gpt:d={width},layers={layers},heads={heads},vocabulary={VOCABULARY}",
               "--sequence", str(SEQUENCE), "--batch", str(arguments.batch), "--world", str(ranks),
               "--page-bytes", str(PAGE_BYTES)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=arguments.timeout, check=False)
    if run.returncode != 0:
        raise SystemExit(f"error: {' '.join(map(str, command))} failed with exit status {run.returncode}:\n{run.stderr}")
    found = {}
    for setting in json.loads(run.stdout)["settings"]:
        if setting["offload_optimizer"] != "device":
            continue
        peak = setting["at_peak"]["device"]
        sent = sum(setting["sent"][link]["bytes"] for link in ("within_host", "between_hosts"))
        found[int(setting["stage"]), setting["checkpoint"]] = Figures(peak["total"], peak["staging"], sent)
    return found


def measured(arguments, data, folder, cell):
    width, layers, heads = MODELS[cell.model]
    command = [arguments.build / "examples/train_gpt", "--data", data, "--d-model", width, "--layers", layers, "--heads", heads,
               "--sequence", SEQUENCE, "--batch", arguments.batch, "--ranks", cell.ranks, "--stage", cell.stage,
               "--checkpoint-activations", cell.policy, "--page-bytes", PAGE_BYTES, "--threads", 1]
    memory, sent = None, []
    for steps in STEPS:
        result = measure(str(cell), [*map(str, command), "--steps", str(steps)], folder, arguments.timeout, lambda json: json)
        memory = result["memory"][0]
        sent.append(sum(result["wire_bytes"][0][operation] for operation in OPERATIONS))
    # Each step ends with the mean of the loss, one fp64 to every other rank.
    loss_bytes = 8 * (cell.ranks - 1)
    return Figures(memory["peak_bytes"], memory["at_peak"]["staging"], sent[1] - sent[0] - loss_bytes)


def error_of(forecast, real):
    return forecast.peak_bytes / real.peak_bytes - 1


def print_report(found):
    rows = [("", "forecast, MiB", "held, MiB", "error", "of it transport, MiB", "sent, forecast", "sent")]
    for cell, (forecast, real) in found.items():
        rows.append((str(cell), f"{forecast.peak_bytes / MIB:.1f}", f"{real.peak_bytes / MIB:.1f}",
                     f"{error_of(forecast, real):+.2%}", f"{(real.staging_bytes - forecast.staging_bytes) / MIB:.1f}",
                     str(forecast.sent_bytes), str(real.sent_bytes)))
    print_table(rows)
    worst = max(found, key=lambda cell: abs(error_of(*found[cell])))
    same = sum(forecast.sent_bytes == real.sent_bytes for forecast, real in found.values())
    print(f"\nlargest error {error_of(*found[worst]):+.2%}: {worst}")
    print(f"bytes sent in a step: forecast to the byte in {same} of {len(found)}")


def main(words=None):
    arguments = parse_arguments(words)
    check_files([arguments.build / "tools/zp", arguments.build / "examples/train_gpt"], arguments.data)
    found = {}
    with tempfile.TemporaryDirectory(prefix="plan-accuracy-") as name:
        folder = Path(name)
        data = data_in(folder, arguments.data)
        for model in arguments.models:
            for ranks in arguments.ranks:
                forecast = forecasts(arguments, model, ranks)
                for stage in arguments.stages:
                    for policy in POLICIES:
                        cell = Cell(model, ranks, stage, policy)
                        found[cell] = forecast[stage, policy], measured(arguments, data, folder, cell)
                        print(f"{cell}: {error_of(*found[cell]):+.2%}", file=sys.stderr, flush=True)
    print_report(found)
    if arguments.json is not None:
        rows = [{**vars(cell), "forecast": vars(forecast), "measured": vars(real)} for cell, (forecast, real) in found.items()]
        arguments.json.write_text(json.dumps({"batch": arguments.batch, "sequence": SEQUENCE, "cells": rows}, indent=1) + "\n")
    good = all(abs(error_of(forecast, real)) <= arguments.tolerance and forecast.sent_bytes == real.sent_bytes
               for forecast, real in found.values())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
