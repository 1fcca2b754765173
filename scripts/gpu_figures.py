#!/usr/bin/env python3
"""The figures of scripts/check_gpu.sh beside their goals, a line each: name, value, goal and met or MISSED, between tabs.

    gpu_figures.py optimizer JSON       of bench/optimizer_step
    gpu_figures.py peers JSON           of bench/against_peers.py
    gpu_figures.py weights JSON...      of train_gpt at stages 0 to 3: the same weights
    gpu_figures.py memory JSON          of train_gpt at stage 3 with pages of at least its largest tensor: its memory against the formula
    gpu_figures.py peaks BARE JSON...   of bare_loop, and of train_gpt with the same model: peak and reserved memory
    gpu_figures.py limits LIMIT JSON    of train_gpt --device-memory LIMIT: what it took
    gpu_figures.py offload JSON         of train_gpt with its optimizer on the host: its speed
    gpu_figures.py losses JSON...       of train_gpt, the same samples in each: the losses of the first one
    gpu_figures.py images JSONL...      metrics of train_imagenet, the same samples in each: the first one's losses in two steps
    gpu_figures.py images_bf16 JSONL... the same, where all but the first one compute in bf16
    gpu_figures.py resnet JSON...       of train_resnet: the same
"""

import json
import math
import re
import statistics
import sys
from pathlib import Path

MIB = 2**20
# Ours divided by the peer, of step times, by (peer, stage); None: no goal.
MOST_RATIO = {("bare", 0): 1.02, ("bare", 3): 1.05, ("fsdp2", 3): 1.0, ("eager", 0): 1.0, ("compiled", 0): None}
MOST_SMALL_TENSORS_SECONDS = 0.3e-3
# Ours divided by the bare loop's, at stage 0 and at stage 3 alike where there is one rank: pages are padded.
MOST_PEAK_RATIO = 1.0001
# MegaTrain's 7 G parameters on one H100; ours by the number of parameters and of micro-batches above which it holds.
LEAST_TFLOPS, LEAST_PARAMETERS, LEAST_MICRO_BATCHES = 272, 6e9, 32
# Relative. Ranks add up in other orders.
MOST_LOSS_DIFFERENCE = 1e-5
# An image model at its full rate makes a thousand times as much of a difference with each step: on the host 1e-7 between one rank
# and four after the first, 3e-4 after the third and 5e-3 after the fourth.
COMPARED_IMAGE_STEPS = 2
MOST_IMAGE_LOSS_DIFFERENCE, MOST_BF16_IMAGE_LOSS_DIFFERENCE = 5e-3, 2e-2
MOST_RESNET_LOSS_DIFFERENCE = 2e-2


def line(name, value, goal, met):
    print(name, value, goal, "met" if met else "MISSED", sep="\t")


def figures_of(path):
    return json.loads(Path(path).read_text())


def optimizer(path):
    result = figures_of(path)
    for group in result["groups"]:
        for name, ratio in group["ratios"].items():
            goal = ratio.get("goal", 0)
            line(f"{name}, {group['name']}", f"{ratio['median']:.2f} [{ratio['min']:.2f}, {ratio['max']:.2f}]",
                 f">= {goal}" if goal else "none", ratio.get("reached", True))
        ours = group["seconds"].get("zeropage::Optimizer")
        if ours:
            line(f"zeropage::Optimizer, {group['name']}", f"{ours['median'] * 1e3:.3f} ms on {result['device']}",
                 f"<= {MOST_SMALL_TENSORS_SECONDS * 1e3:g} ms on cuda",
                 not result["device"].startswith("cuda") or ours["median"] <= MOST_SMALL_TENSORS_SECONDS)


def peers(path):
    result = figures_of(path)
    stage = result["flags"]["stage"]
    ours = result["runs"]["ours"]
    updates = [run["update_seconds"] for run in ours]
    line(f"optimizer's step, stage {stage}", f"{statistics.median(updates) * 1e3:.2f} ms of "
         f"{statistics.median(run['step_seconds'] for run in ours) * 1e3:.2f} ms, {len(ours)} rounds", "none", True)
    for peer, figures in result["against"].items():
        step = figures["step_seconds"]
        ratio = step["ratio"]
        most = MOST_RATIO[peer, stage]
        goal = "none" if most is None else f"<= {most}"
        line(f"step time, stage {stage} / {peer}",
             f"{ratio['median']:.3f} [{ratio['min']:.3f}, {ratio['max']:.3f}] of {step['peer']:.4f} s",
             goal, most is None or ratio["median"] <= most)
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
    hashes = [figures_of(path)["weights_sha256"] for path in paths]
    different = len(set(hashes))
    name = f"weights of {', '.join(Path(path).stem for path in paths)}"
    name = re.sub(r"(, )?two-ranks-([\w-]+)-(\d)", lambda m: f"{'' if m[1] else m[2] + ', stages '}{m[3]} ", name)
    line(name.strip(), f"{different} different", "the same bits", different == 1)


def memory(path):
    result = figures_of(path)
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


def peaks(bare_path, *paths):
    bare = figures_of(bare_path)
    bare_peak = bare["memory"][0]["peak_bytes"]
    for path in paths:
        result = figures_of(path)
        stage, memory_of_rank = result["flags"]["stage"], result["memory"][0]
        peak, reserved = memory_of_rank["peak_bytes"], memory_of_rank["reserved_bytes"]
        line(f"peak, stage {stage} / bare loop", f"{peak / bare_peak:.4f}: {peak / MIB:.0f} of {bare_peak / MIB:.0f} MiB",
             f"<= {MOST_PEAK_RATIO}", peak <= MOST_PEAK_RATIO * bare_peak)
        line(f"reserved beyond the peak, stage {stage}", f"{reserved / peak - 1:.1%}: {reserved / MIB:.0f} MiB", "none", True)
        ratio = steady_seconds(result) / steady_seconds(bare)
        line(f"step time, stage {stage} / bare loop, 1.2 G", f"{ratio:.3f}", "none", True)


def steady_seconds(result):
    """The first step makes memory and records the order of pages."""
    return statistics.median(result["step_seconds"][1:])


def limits(limit, path):
    number, unit = re.fullmatch(r"([0-9]+)(MiB|GiB)", limit).groups()
    most = int(number) * {"MiB": MIB, "GiB": 2**30}[unit]
    result = figures_of(path)
    for rank in result["memory"]:
        line(f"reserved below {limit}", f"{rank['reserved_bytes'] / MIB:.1f} MiB, at the peak {rank['peak_bytes'] / MIB:.1f}",
             f"<= {most / MIB:.0f} MiB", rank["reserved_bytes"] <= most)
    line(f"chosen below {limit}", result["fits"], "a setting", bool(result["fits"]))


def offload(path):
    result = figures_of(path)
    flags, parameters = result["flags"], result["parameters"]
    micro_batches = flags["accumulate"]
    tokens = flags["batch"] * flags["sequence"] * micro_batches
    # PaLM's count, as train_gpt's.
    flops = 6 * parameters + 12 * flags["layers"] * flags["d-model"] * flags["sequence"]
    seconds = steady_seconds(result)
    tflops = tokens * flops / seconds / 1e12
    has_goal = parameters >= LEAST_PARAMETERS and micro_batches >= LEAST_MICRO_BATCHES
    name = f"{parameters / 1e9:.2f} G parameters on the host, {micro_batches} micro-batches"
    line(name, f"{tflops:.0f} TFLOPS, {seconds:.3f} s a step, {tokens / seconds:.0f} tokens/s",
         f">= {LEAST_TFLOPS} TFLOPS" if has_goal else "none", not has_goal or tflops >= LEAST_TFLOPS)
    memory_of_rank = result["memory"][0]
    device = f"{memory_of_rank['peak_bytes'] / 2**30:.1f} GiB of the device"
    if "reserved_bytes" in memory_of_rank:
        device += f", {memory_of_rank['reserved_bytes'] / 2**30:.1f} reserved"
    line(f"memory, {name}", f"{device}; {memory_of_rank['offloaded']['host_bytes'] / 2**30:.1f} GiB of the host", "none", True)


def beside_first(named_losses, most, most_steps=None):
    """named_losses: (name, {step: loss}); each beside the first one at the steps, or the first so many, that both have."""
    (first, expected), *others = named_losses
    for name, got in others:
        steps = sorted(expected.keys() & got.keys())[:most_steps]
        worst = max((abs(got[step] - expected[step]) / abs(expected[step]) for step in steps), default=math.inf)
        line(f"losses of {name} beside {first}", f"differ by {worst:.1e} in {len(steps)} steps", f"<= {most:g}", worst <= most)


def losses(*paths):
    def by_step(path):
        result = figures_of(path)
        return dict(enumerate(result["loss"], result["first_step"]))
    beside_first([(Path(path).stem, by_step(path)) for path in paths], MOST_LOSS_DIFFERENCE)


def image_losses(path):
    lines = [json.loads(text) for text in Path(path).read_text().splitlines()]
    return {entry["step"]: entry["loss"] for entry in lines if entry["of"] == "training"}


def images(*paths):
    beside_first([(Path(path).stem, image_losses(path)) for path in paths], MOST_IMAGE_LOSS_DIFFERENCE, COMPARED_IMAGE_STEPS)


def images_bf16(*paths):
    beside_first([(Path(path).stem, image_losses(path)) for path in paths], MOST_BF16_IMAGE_LOSS_DIFFERENCE, COMPARED_IMAGE_STEPS)


def resnet(*paths):
    beside_first([(Path(path).stem, {figures_of(path)["steps"]: figures_of(path)["loss"]}) for path in paths],
                 MOST_RESNET_LOSS_DIFFERENCE)


READERS = (optimizer, peers, weights, memory, peaks, limits, offload, losses, images, images_bf16, resnet)

if __name__ == "__main__":
    {reader.__name__: reader for reader in READERS}[sys.argv[1]](*sys.argv[2:])
