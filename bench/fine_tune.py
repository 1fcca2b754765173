#!/usr/bin/env python3
"""Fine-tunes a real model by `zp-lm finetune` at stage 3, and by plain PyTorch with DDP and FSDP2: the same weights, batches and AdamW, on
this machine. Says how far the losses part, and compares peak memory and step times. Exit status: 0 measured, and all losses agree to 1 %;
1 a run failed or losses differ; 2 the command line is wrong."""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "release"
WARM_UP_STEPS = 2
MOST_LOSS_DIFFERENCE = 0.01
SETTINGS = {"lr": 2e-5, "weight-decay": 0.01, "beta1": 0.9, "beta2": 0.95, "clip-norm": 1.0, "warm-up": 10}
LEAST_RATE = 0.1


def run(command, **more):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **more)
    if done.returncode != 0:
        words = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        sys.exit(f"error: {' '.join(map(str, command))}: exit status {done.returncode}\n{words}")


def ours(arguments, folder, result):
    settings = [word for name, value in SETTINGS.items() for word in (f"--{name}", value)]
    run([BUILD / "examples/zp-lm", "finetune", "--model", folder / "model", "--tokenizer", arguments.model, "--text", *arguments.text, "--join-documents", "--steps",
         arguments.steps, "--batch", arguments.batch, "--micro-batch", arguments.batch // arguments.ranks, "--length", arguments.length,
         "--held-out-share", 0, "--least-lr", LEAST_RATE, *settings, "--ranks", arguments.ranks, "--threads", arguments.threads, "--stage", 3,
         "--json", result])
    found = json.loads(result.read_text())
    return {"loss": [step["loss"] for step in found["steps"]], "seconds": [step["seconds"] for step in found["steps"]],
            "peak": found["peak_resident_bytes"], "base": found["resident_bytes_before_opening"]}


def peer(kind, arguments, folder, result):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = [word for name, value in SETTINGS.items() for word in (f"--{name}", value)]
    command = [sys.executable, ROOT / "bench/peers/fine_tune.py", "--kind", kind, "--model", folder / "model", "--batches",
               folder / "batches.safetensors", "--steps", arguments.steps, "--least-rate", LEAST_RATE, *settings, "--json", result]
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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "datasets/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--text", type=Path, nargs="+", default=[ROOT / "datasets/austen/emma.txt"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="threads of a rank (default 1)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=2, help="rows of a step, over all ranks, which divide it (default 2)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row (default 128)")
    parser.add_argument("--sides", nargs="+", choices=["zeropage", "ddp", "fsdp2"], default=["zeropage", "ddp", "fsdp2"])
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    if arguments.batch % arguments.ranks:
        parser.error(f"--batch {arguments.batch}: expected a multiple of --ranks {arguments.ranks}")
    if arguments.steps <= WARM_UP_STEPS:
        parser.error(f"--steps {arguments.steps}: expected more than {WARM_UP_STEPS}, which are not measured")
    for file in (arguments.model, *arguments.text):
        if not file.exists():
            parser.error(f"{file}: is not there; scripts/get_data.sh fetches smollm2-135m and austen")
    with tempfile.TemporaryDirectory(dir=BUILD) as name:
        folder = Path(name)
        run([BUILD / "examples/zp-lm", "export", "--model", arguments.model, "--out", folder / "model"])
        run([BUILD / "bench/training_batches", "--tokenizer", arguments.model, "--text", *arguments.text, "--length", arguments.length,
             "--batch", arguments.batch, "--steps", arguments.steps, "--out", folder / "batches.safetensors"])
        found = {}
        for side in arguments.sides:
            result = folder / f"{side}.json"
            found[side] = ours(arguments, folder, result) if side == "zeropage" else peer(side, arguments, folder, result)
            print(f"{side}: {arguments.steps} steps", file=sys.stderr)
    if arguments.json:
        arguments.json.write_text(json.dumps({"arguments": {k: str(v) for k, v in vars(arguments).items()}, "sides": found}, indent=1))
    first = found[arguments.sides[0]]
    print(f"{arguments.ranks} ranks, {arguments.threads} thread each, {arguments.batch} rows of {arguments.length} tokens a step, fp32")
    print(f"{'side':10} {'step s':>8} {'peak MiB':>9} {'first loss':>11} {'last loss':>10} {'most apart':>11}")
    worst = 0
    for side, of in found.items():
        apart = max(abs(a - b) / b for a, b in zip(first["loss"], of["loss"]))
        worst = max(worst, apart)
        print(f"{side:10} {statistics.median(of['seconds'][WARM_UP_STEPS:]):8.3f} {of['peak'] / 2**20:9.0f} {of['loss'][0]:11.5f} "
              f"{of['loss'][-1]:10.5f} {apart:11.2e}")
    for side, of in list(found.items())[1:]:
        time = statistics.median(first["seconds"][WARM_UP_STEPS:]) / statistics.median(of["seconds"][WARM_UP_STEPS:])
        print(f"{arguments.sides[0]} / {side}: step {time:.2f}, peak {first['peak'] / of['peak']:.2f}")
    return 0 if worst <= MOST_LOSS_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
