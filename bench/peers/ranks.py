"""What every peer shares: it starts the ranks, times the steps, reads the memory and writes the
JSON file, with the keys that train_gpt writes. A peer brings only its `build`."""

import json
import os
import socket
import sys
import time

import torch

# DistributedDataParallel imports this when it is constructed: 120 MiB of code that training does
# not need and a C++ program has no counterpart of, so it counts to the base.
import torch._dynamo  # noqa: F401
import torch.distributed as dist
import torch.multiprocessing

import flags
import gpt

MMAP_THRESHOLD_BYTES = 128 * 1024  # glibc's first


def main(description, peer, build):
    """The program of a peer, from its command line on."""
    launch(flags.peer_arguments(description, peer), build)


def launch(arguments, build):
    """Runs `arguments.ranks` processes. `build(arguments)` is a top-level function that makes the
    model and the optimizer and returns `step(inputs, targets) -> loss`, one training step."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(arguments.ranks),
        LOCAL_WORLD_SIZE=str(arguments.ranks),
        OMP_NUM_THREADS=str(arguments.threads),
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if arguments.options["malloc"] == "mmap":
        # glibc raises its threshold to 32 MiB otherwise, and freed tensors fragment its heaps.
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MMAP_THRESHOLD_BYTES)
    # Of the parent's making and without sockets: no rank leaves while another still communicates.
    all_done = torch.multiprocessing.get_context("spawn").Barrier(arguments.ranks)
    torch.multiprocessing.spawn(_run_rank, (arguments, build, all_done), nprocs=arguments.ranks)


def _run_rank(rank, arguments, build, all_done):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(arguments.threads)
    dist.init_process_group("gloo")
    data = gpt.TrainingData(arguments.data, arguments, rank)

    base_bytes = reset_rss_peak()
    step = build(arguments)
    step_seconds, losses = [], []
    for index in range(arguments.steps):
        inputs, targets = data.step(index)
        start = time.perf_counter()
        loss = step(inputs, targets)
        step_seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    memory = {"rank": rank, "rss_base_bytes": base_bytes, "rss_peak_bytes": rss_peak()}

    mean_losses = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean_losses)
    mean_losses /= arguments.ranks
    memories = [None] * arguments.ranks
    dist.all_gather_object(memories, memory)
    if rank == 0:
        result = {
            "step_seconds": step_seconds,
            "loss": mean_losses.tolist(),
            "memory": memories,
            "options": arguments.options,
            "torch": torch.__version__,
        }
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    all_done.wait()
    # Not through the destructors: torch 2.11's ~ProcessGroupGloo may join its worker with the GIL
    # held while the worker waits for the GIL to release a tensor, and then hangs for ever.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def reset_rss_peak():
    """Sets the process's high-water mark to what is resident now; returns that, in bytes."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return _status_bytes("VmRSS")


def rss_peak():
    return _status_bytes("VmHWM")


def _status_bytes(field):
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
