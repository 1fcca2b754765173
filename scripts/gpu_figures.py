#!/usr/bin/env python3
"""The figures of scripts/check_gpu.sh beside their goals, a line each: name, value, goal and met or MISSED, between tabs.

    gpu_figures.py kernels LOG       of bench/optimizer_step
    gpu_figures.py peers JSON        of bench/against_peers.py
    gpu_figures.py weights JSON...   of train_gpt at stages 0 to 3: the same weights
    gpu_figures.py memory JSON       of train_gpt at stage 3 with pages of at least its largest tensor: its memory against the formula
"""

import json
import re
import statistics
import sys
from pathlib import Path

MIB = 2**20
# Ours divided by the peer, of step times, by (peer, stage).
MOST_RATIO = {("bare", 0): 1.02, ("bare", 3): 1.05, ("fsdp2", 3): 1.0}


def line(name, value, goal, met):
    print(name, value, goal, "met" if met else "MISSED", sep="\t")


def kernels(log):
    for yardstick, least in (("copy bandwidth", 0.90), ("at::_fused_adamw_", 1.0)):
        name = f"fused AdamW / {yardstick}"
        found = re.search(rf"^{re.escape(name)}: ([0-9.]+) (\[.*?\])", Path(log).read_text(), re.MULTILINE)
        if found is None:
            line(name, "not in the log", f">= {least}", False)
        else:
            line(name, f"{found[1]} {found[2]}", f">= {least}", float(found[1]) >= least)


def peers(path):
    result = json.loads(Path(path).read_text())
    stage = result["flags"]["stage"]
    ours = result["runs"]["ours"]
    updates = [run["update_seconds"] for run in ours]
    line(f"optimizer's step, stage {stage}", f"{statistics.median(updates) * 1e3:.2f} ms of "
         f"{statistics.median(run['step_seconds'] for run in ours) * 1e3:.2f} ms, {len(ours)} rounds", "none", True)
    for peer, figures in result["against"].items():
        step = figures["step_seconds"]
        ratio = step["ratio"]
        most = MOST_RATIO[peer, stage]
        line(f"step time, stage {stage} / {peer}",
             f"{ratio['median']:.3f} [{ratio['min']:.3f}, {ratio['max']:.3f}] of {step['peer']:.4f} s",
             f"<= {most}", ratio["median"] <= most)
        worst = figures["worst_loss_difference"]
        line(f"losses, stage {stage} and {peer}", f"differ by {worst['relative']:.1e}",
             f"<= {result['loss_tolerance']:g}", worst["agrees"])
        memory = figures["device_bytes"]
        if peer == "bare":
            line(f"final weights, stage {stage} and {peer}",
                 "the same bits" if figures["same_weights"] else "not the same bits", "none", True)
        line(f"device memory at the peak, stage {stage} / {peer}",
             f"{memory['ratio']['median']:.3f} of {memory['peer'] / MIB:.0f} MiB", "none", True)


def weights(*paths):
    hashes = [json.loads(Path(path).read_text())["weights_sha256"] for path in paths]
    different = len(set(hashes))
    name = f"weights of {', '.join(Path(path).stem for path in paths)}"
    name = re.sub(r"(, )?two-ranks-([\w-]+)-(\d)", lambda m: f"{'' if m[1] else m[2] + ', stages '}{m[3]} ", name)
    line(name.strip(), f"{different} different", "the same bits", different == 1)


def memory(path):
    result = json.loads(Path(path).read_text())
    page_bytes = result["flags"]["page-bytes"]
    dtype = result["flags"]["compute-dtype"]
    for rank in result["memory"]:
        peak = rank["at_peak"]
        formula = rank["formula_bytes"]
        held = rank["persistent_bytes"] / formula
        line(f"persistent / formula, stage 3, {dtype}, rank {rank['rank']}", f"{held:.4f}", "<= 1.01", held <= 1.01)
        # The budget is two pages, and a bucket is a page.
        activations = sum(bytes for kind, bytes in peak.items() if kind.startswith(("activation", "recompute")))
        transient = sum(peak.values()) - activations - peak["staging"] - formula
        line(f"peak over the formula, stage 3, {dtype}, rank {rank['rank']}",
             f"{transient / MIB:.1f} MiB; staging {peak['staging'] / MIB:.1f}, activations "
             f"{activations / MIB:.1f}", f"<= {3 * page_bytes / MIB:.1f} MiB, 3 pages",
             transient <= 3 * page_bytes)


if __name__ == "__main__":
    {"kernels": kernels, "peers": peers, "weights": weights, "memory": memory}[sys.argv[1]](*sys.argv[2:])
