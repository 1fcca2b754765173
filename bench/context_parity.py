#!/usr/bin/env python3
"""Trains a small random Llama with `zp-lm finetune` on ranks that have some of each row's tokens (--context), and compares losses,
gradient norms and final weights with those of one rank that has whole rows: both forms of attention, all stages, with and without
layers that are computed again, rows of one document and of several.

Differences are relative, and the largest of all steps and of all tensors of weights, which are compared by their 2-norm. They may
be at most 1e-10 in fp64 and 1e-5 in fp32. In bf16, where another order of sums rounds to other values, a run over ranks may be as
far from one rank in fp32 as three times what one rank in bf16 is.

Exit status: 0 all are below their bounds; 1 some are not, or a run failed; 2 the command line is wrong; 128 + n stopped by signal n."""

import argparse
import itertools
import json
import math
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from array import array
from dataclasses import dataclass, fields
from pathlib import Path

import peer_venv
from report import print_table
from runs import check_files, measure

BOUNDS = {"fp64": 1e-10, "fp32": 1e-5}
TIMES_ITS_OWN_ROUNDING = 3  # bf16
WHOLE, PACKED = "whole", "documents"
CHOICES = {"dtypes": ["fp64", "fp32", "bf16"], "ranks": ["2/2", "4/4", "4/2"], "forms": ["ring", "ulysses"], "stages": ["0", "1", "2", "3"],
           "recompute": ["off", "on"], "rows": [WHOLE, PACKED]}

ROWS, LENGTH = 4, 64  # of a step, in tokens
# Ulysses over 4 ranks has to repeat the two heads of keys.
CONFIG = {"model_type": "llama", "vocab_size": 257, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
          "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-5,
          "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "initializer_range": 0.2}
END = "<|endoftext|>"


@dataclass(frozen=True)
class Setting:
    dtype: str
    rows: str
    ranks: int = 1
    context: int = 1
    form: str = "ring"
    stage: int = 0
    recomputes: bool = False

    def flags(self):
        flags = ["--dtype", self.dtype, "--ranks", self.ranks, "--context", self.context, "--context-form", self.form, "--stage", self.stage]
        if self.recomputes:
            flags.append("--recompute-layers")
        if self.rows == WHOLE:
            flags.append("--join-documents")
        if self.dtype != "fp64":  # which is written as it is
            flags += ["--export-dtype", "fp32"]
        return [str(flag) for flag in flags]

    def name(self):
        recompute = ", layers recomputed" if self.recomputes else ""
        return f"{self.dtype}, {self.rows}, {self.ranks} ranks, context {self.context}, {self.form}, stage {self.stage}{recompute}"


@dataclass(frozen=True)
class Trained:
    losses: list
    norms: list
    weights: dict  # name -> array


@dataclass(frozen=True)
class Differences:
    losses: float = 0.0
    norms: float = 0.0
    weights: float = 0.0

    def largest(self, other):
        return Differences(*(largest_of([getattr(self, field.name), getattr(other, field.name)]) for field in fields(self)))


def largest_of(values):
    """NaN where one is, which max() passes over."""
    values = list(values)
    return math.nan if any(map(math.isnan, values)) else max(values)


def parse_arguments(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, choices in CHOICES.items():
        meaning = " (ranks / those that share rows)" if name == "ranks" else ""
        parser.add_argument(f"--{name}", default=",".join(choices), help=f"some of {', '.join(choices)}{meaning} (default: all)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a run (default 10)")
    parser.add_argument("--zp-lm", type=Path, default=peer_venv.ROOT / "build/release/examples/zp-lm", help="the program")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a run may take (default 300)")
    arguments = parser.parse_args(words)
    for name, choices in CHOICES.items():
        chosen = getattr(arguments, name).split(",")
        for word in chosen:
            if word not in choices:
                parser.error(f"--{name} {word}: expected some of {', '.join(choices)}, with commas between")
        setattr(arguments, name, chosen)
    if arguments.steps < 1:
        parser.error(f"--steps must be at least 1, got {arguments.steps}")
    return arguments


def alphabet():
    """The character of each byte in byte-level vocabularies, as GPT-2 has them."""
    seen = {byte for byte in range(256) if 33 <= byte <= 126 or (byte >= 161 and byte != 173)}
    others = iter(range(256, 512))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]


def write_inputs(folder, program, steps):
    """A model with random weights, a tokenizer of bytes, and documents of unequal lengths. Returns the flags that name them."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = folder / "model"
    made = subprocess.run([program, "init", "--config", folder / "config.json", "--out", model, "--seed", "1"], capture_output=True, text=True,
                          check=False)
    if made.returncode != 0:
        raise SystemExit(f"error: zp-lm init failed with exit status {made.returncode}: {made.stderr}")
    vocabulary = {character: byte for byte, character in enumerate(alphabet())} | {END: 256}
    (model / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": [{"id": 256, "content": END, "special": True, "normalized": False, "single_word": False,
                                            "lstrip": False, "rstrip": False}],
        "normalizer": None, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False}, "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}))
    draw = random.Random(1)
    texts, tokens = [], 0
    while tokens < (ROWS * steps + 1) * LENGTH:
        text = "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(5, 3 * LENGTH // 2)))
        texts.append(folder / f"{len(texts)}.txt")
        texts[-1].write_text(text)
        tokens += len(text) + 1
    return ["--model", model, "--text", *texts]


def weights_of(file):
    """name -> values, of safetensors in fp32 or fp64."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    values = data[8 + length :]
    return {name: array({"F32": "f", "F64": "d"}[entry["dtype"]], values[slice(*entry["data_offsets"])])
            for name, entry in header.items() if name != "__metadata__"}


def train(setting, inputs, folder, arguments):
    out = folder / "trained"
    shutil.rmtree(out, ignore_errors=True)
    command = [arguments.zp_lm, "finetune", *inputs, *setting.flags(), "--threads", "1", "--steps", str(arguments.steps), "--batch", str(ROWS),
               "--micro-batch", str(ROWS // 2), "--length", str(LENGTH), "--held-out-share", "0", "--lr", "1e-3", "--warm-up", "0",
               "--page-bytes", "16KiB", "--out", out]
    steps = measure(setting.name(), command, folder, arguments.timeout, lambda result: result["steps"])
    return Trained([step["loss"] for step in steps], [step["norm"] for step in steps], weights_of(out / "model.safetensors"))


def difference(of, beside):
    def of_lists(some, others):
        return largest_of(abs(one - other) / abs(other) for one, other in zip(some, others, strict=True))

    def of_tensors(one, other):
        return math.dist(one, other) / math.hypot(*other)

    return Differences(of_lists(of.losses, beside.losses), of_lists(of.norms, beside.norms),
                       largest_of(of_tensors(of.weights[name], values) for name, values in beside.weights.items()))


class Parity:
    """The runs, and what they may differ by."""

    def __init__(self, inputs, folder, arguments):
        self.inputs, self.folder, self.arguments = inputs, folder, arguments
        self.alone = {}

    def of_one_rank(self, dtype, rows):
        if (dtype, rows) not in self.alone:
            self.alone[dtype, rows] = self.train(Setting(dtype, rows))
        return self.alone[dtype, rows]

    def train(self, setting):
        return train(setting, self.inputs, self.folder, self.arguments)

    def bounds(self, dtype, rows):
        if dtype in BOUNDS:
            return Differences(*[BOUNDS[dtype]] * len(fields(Differences)))
        own = difference(self.of_one_rank(dtype, rows), self.of_one_rank("fp32", rows))
        return Differences(*(TIMES_ITS_OWN_ROUNDING * getattr(own, field.name) for field in fields(own)))

    def largest(self, dtype, rows, ranks, form):
        """Over all stages, with and without layers that are computed again, and how many runs that were."""
        beside = self.of_one_rank(dtype if dtype in BOUNDS else "fp32", rows)
        everyone, context = map(int, ranks.split("/"))
        worst, runs = Differences(), 0
        for stage, recompute in itertools.product(self.arguments.stages, self.arguments.recompute):
            setting = Setting(dtype, rows, everyone, context, form, int(stage), recompute == "on")
            worst = worst.largest(difference(self.train(setting), beside))
            runs += 1
        return worst, runs


def main(words=None):
    arguments = parse_arguments(words)
    check_files([arguments.zp_lm], None)
    arguments.zp_lm = arguments.zp_lm.resolve()
    names = [field.name for field in fields(Differences)]
    table = [("", "ranks", "context", "form", "rows", "runs", *(cell for name in names for cell in (name, "bound")))]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="context-parity-") as name:
        folder = Path(name)
        parity = Parity(write_inputs(folder, arguments.zp_lm, arguments.steps), folder, arguments)
        for dtype, ranks, form, rows in itertools.product(arguments.dtypes, arguments.ranks, arguments.forms, arguments.rows):
            worst, runs = parity.largest(dtype, rows, ranks, form)
            bounds = parity.bounds(dtype, rows)
            pairs = [(getattr(worst, name), getattr(bounds, name)) for name in names]
            # Whatever is no number is above, too.
            failed += not all(of <= bound for of, bound in pairs)
            table.append((dtype, *ranks.split("/"), form, rows, str(runs), *(f"{value:.1e}" for pair in pairs for value in pair)))
            print(f"{dtype}, {ranks} ranks, {form}, {rows}: {worst}", file=sys.stderr, flush=True)
    print(f"{arguments.steps} steps beside one rank's; largest relative differences over {len(arguments.stages)} stages\n")
    print_table(table)
    print(f"\n{'all are below their bounds' if failed == 0 else f'{failed} of {len(table) - 1} lines are ABOVE their bounds'}")
    return 0 if failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
