#!/usr/bin/env python3
"""Fine-tunes a real model by `zp-lm finetune` at stage 3, or adapters of it by `zp-lm lora`, and by plain PyTorch with DDP and FSDP2: the
same weights, batches and AdamW, on this machine. Says how far the losses part, and compares peak memory and step times. Exit status: 0
measured, and all losses agree to 1 %; 1 a run failed or losses differ; 2 the command line is wrong."""

import argparse
import array
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import peer_venv

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "release"
WARM_UP_STEPS = 2
MOST_LOSS_DIFFERENCE = 0.01
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # that get an adapter
LORA_ALPHA = 16
SETTINGS = {"lr": 2e-5, "weight-decay": 0.01, "beta1": 0.9, "beta2": 0.95, "clip-norm": 1.0, "warm-up": 10}
LEAST_RATE = 0.1


def run(command, **more):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **more)
    if done.returncode != 0:
        words = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        sys.exit(f"error: {' '.join(map(str, command))}: exit status {done.returncode}\n{words}")


def write_adapters(folder, model, rank):
    """New adapters in peft's form, for all sides to begin with: A as torch.nn.Linear draws it, B zero."""
    config = json.loads((model / "config.json").read_text())
    width, head = config["hidden_size"], config["head_dim"]
    queries, keys, mlp = config["num_attention_heads"] * head, config["num_key_value_heads"] * head, config["intermediate_size"]
    sizes = {"self_attn.q_proj": (width, queries), "self_attn.k_proj": (width, keys), "self_attn.v_proj": (width, keys),
             "self_attn.o_proj": (queries, width), "mlp.gate_proj": (width, mlp), "mlp.up_proj": (width, mlp), "mlp.down_proj": (mlp, width)}
    draw = random.Random(1)
    header, values = {}, array.array("f")

    def add(name, sizes, bound):
        begin = len(values) * values.itemsize
        values.extend(draw.uniform(-bound, bound) for _ in range(math.prod(sizes)))
        header[name] = {"dtype": "F32", "shape": sizes, "data_offsets": [begin, len(values) * values.itemsize]}

    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            add(f"{prefix}.lora_A.weight", [rank, inputs], 1 / math.sqrt(inputs))
            add(f"{prefix}.lora_B.weight", [outputs, rank], 0)
    folder.mkdir()
    words = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(words).to_bytes(8, "little") + words + values.tobytes())
    (folder / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": LORA_ALPHA, "lora_dropout": 0.0, "target_modules": LAYERS,
         "bias": "none"}))


def settings_of(arguments):
    settings = SETTINGS | ({"lr": 2e-4, "weight-decay": 0} if arguments.lora else {})
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def ours(arguments, folder, result, steps):
    adapters = ["--adapters", folder / "adapters"] if arguments.lora else []
    run([BUILD / "examples/zp-lm", "lora" if arguments.lora else "finetune", *adapters, "--model", folder / "model", "--tokenizer", arguments.model, "--text", *arguments.text, "--join-documents", "--steps",
         steps, "--batch", arguments.batch, "--micro-batch", arguments.batch // arguments.ranks, "--length", arguments.length,
         "--held-out-share", 0, "--least-lr", LEAST_RATE, *settings_of(arguments), "--ranks", arguments.ranks, "--threads", arguments.threads, "--stage", 3,
         "--json", result])
    found = json.loads(result.read_text())
    return {"loss": [step["loss"] for step in found["steps"]], "seconds": [step["seconds"] for step in found["steps"]],
            "peak": found["peak_resident_bytes"], "base": found["resident_bytes_before_opening"]}


def python_of_peers(arguments):
    if arguments.sides == ["zeropage"]:
        return None
    if arguments.python == "current":
        return peer_venv.current(with_cuda=False)
    return peer_venv.ensure([f"torch=={peer_venv.TORCH_VERSION}", "numpy", "safetensors==0.8.0"], environment={})


def peer(kind, arguments, folder, result, steps):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    adapters = ["--adapters", folder / "adapters"] if arguments.lora else []
    command = [arguments.interpreter, ROOT / "bench/peers/fine_tune.py", "--kind", kind, "--model", folder / "model", "--batches",
               folder / "batches.safetensors", "--steps", steps, "--least-rate", LEAST_RATE, *settings_of(arguments), *adapters, "--json", result]
    everywhere = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(arguments.ranks),
                  "OMP_NUM_THREADS": str(arguments.threads), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [subprocess.Popen([str(word) for word in command], env={**everywhere, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for rank in range(arguments.ranks)]
    errors = [process.communicate()[1] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"error: the peer {kind} failed\n" + "\n".join(errors)[-4000:])
    found = json.loads(result.read_text())
    return {"loss": found["loss"], "seconds": found["step_seconds"], "peak": max(rank["training"] for rank in found["memory"]),
            "base": max(rank["base"] for rank in found["memory"])}


def step_seconds(found):
    return statistics.median(found["seconds"][WARM_UP_STEPS:])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "datasets/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--text", type=Path, nargs="+", default=[ROOT / "datasets/austen/emma.txt"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="threads of a rank (default 1)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=2, help="rows of a step, over all ranks, which divide it (default 2)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row (default 128)")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of that rank beside frozen weights")
    parser.add_argument("--rounds", type=int, default=0, help="short runs of all sides in turn, for the ratio of step times (default 0: from "
                        "the long runs, one after the other)")
    parser.add_argument("--round-steps", type=int, default=10, help="steps of a short run (default 10)")
    parser.add_argument("--sides", nargs="+", choices=["zeropage", "ddp", "fsdp2"], default=["zeropage", "ddp", "fsdp2"])
    parser.add_argument("--python", choices=["venv", "current"], default="venv", help="interpreter of the peers: .venv-peers, made where missing, or the "
                        "python3 that runs this, which has torch and safetensors (default venv)")
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    if arguments.batch % arguments.ranks:
        parser.error(f"--batch {arguments.batch}: expected a multiple of --ranks {arguments.ranks}")
    for name in ("steps", "round_steps"):
        if getattr(arguments, name) <= WARM_UP_STEPS:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)}: expected more than {WARM_UP_STEPS}, which are not measured")
    for file in (arguments.model, *arguments.text):
        if not file.exists():
            parser.error(f"{file}: is not there; scripts/get_data.sh fetches smollm2-135m and austen")
    arguments.interpreter = python_of_peers(arguments)
    with tempfile.TemporaryDirectory(dir=BUILD) as name:
        folder = Path(name)
        run([BUILD / "examples/zp-lm", "export", "--model", arguments.model, "--out", folder / "model"])
        run([BUILD / "bench/training_batches", "--tokenizer", arguments.model, "--text", *arguments.text, "--length", arguments.length,
             "--batch", arguments.batch, "--steps", max(arguments.steps, arguments.round_steps), "--out", folder / "batches.safetensors"])
        if arguments.lora:
            write_adapters(folder / "adapters", folder / "model", arguments.lora)

        def measured(side, steps):
            result = folder / f"{side}.json"
            return ours(arguments, folder, result, steps) if side == "zeropage" else peer(side, arguments, folder, result, steps)

        rounds = []
        for number in range(arguments.rounds):
            rounds.append({side: step_seconds(measured(side, arguments.round_steps)) for side in arguments.sides})
            print(f"round {number + 1}/{arguments.rounds}: " + ", ".join(f"{side} {seconds:.3f} s" for side, seconds in rounds[-1].items()),
                  file=sys.stderr)
        found = {}
        for side in arguments.sides:
            found[side] = measured(side, arguments.steps)
            print(f"{side}: {arguments.steps} steps", file=sys.stderr)
    if arguments.json:
        arguments.json.write_text(json.dumps({"arguments": {k: str(v) for k, v in vars(arguments).items()}, "sides": found, "rounds": rounds},
                                             indent=1))
    first = found[arguments.sides[0]]
    print(f"{arguments.ranks} ranks, {arguments.threads} thread each, {arguments.batch} rows of {arguments.length} tokens a step, fp32" +
          (f", adapters of rank {arguments.lora}" if arguments.lora else ""))
    print(f"{'side':10} {'step s':>8} {'peak MiB':>9} {'first loss':>11} {'last loss':>10} {'most apart':>11}")
    worst = 0
    for side, of in found.items():
        apart = max(abs(a - b) / b for a, b in zip(first["loss"], of["loss"]))
        worst = max(worst, apart)
        print(f"{side:10} {step_seconds(of):8.3f} {of['peak'] / 2**20:9.0f} {of['loss'][0]:11.5f} "
              f"{of['loss'][-1]:10.5f} {apart:11.2e}")
    for side, of in list(found.items())[1:]:
        ratios = [a_round[arguments.sides[0]] / a_round[side] for a_round in rounds] or [step_seconds(first) / step_seconds(of)]
        print(f"{arguments.sides[0]} / {side}: step {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} "
              f"{'rounds' if rounds else 'run'}), peak {first['peak'] / of['peak']:.2f}, of which before the model {first['base'] / 2**20:.0f} "
              f"and {of['base'] / 2**20:.0f} MiB")
    return 0 if worst <= MOST_LOSS_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
