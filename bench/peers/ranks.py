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


def main(description, peer, build, data_ranks=None):
    """The program of a peer, from its command line on; the rest as of launch()."""
    launch(flags.peer_arguments(description, peer), build, data_ranks)


def launch(arguments, build, data_ranks=None):
    """Runs `arguments.ranks` processes. `build(arguments)` is a top-level function that makes the
    model and the optimizer and returns `step(inputs, targets) -> loss`, one training step. Only so
    many `data_ranks` have samples of their own (default: all), and the others repeat them."""
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
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if arguments.options["malloc"] == "mmap":
        # glibc raises its threshold to 32 MiB otherwise, and freed tensors fragment its heaps.
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MMAP_THRESHOLD_BYTES)
    # Of the parent's making and without sockets: no rank leaves while another still communicates.
    all_done = torch.multiprocessing.get_context("spawn").Barrier(arguments.ranks)
    to_ranks = (arguments, build, data_ranks or arguments.ranks, all_done)
    torch.multiprocessing.spawn(_run_rank, to_ranks, nprocs=arguments.ranks)


def device_of(arguments):
    """Where the calling rank trains."""
    if arguments.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())


def _meet(arguments):
    """NCCL where every rank has a device of its own, Gloo elsewhere and for what is on the host."""
    backend = "gloo"
    if arguments.device == "cuda":
        torch.cuda.set_device(device_of(arguments))
        if arguments.ranks <= torch.cuda.device_count():
            backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend)


def _now_on(device):
    """An event where the device's work comes to what is enqueued next; None on a host."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class StepStart:
    """Where a step begins: now on a host, and on a device where its work comes to what is enqueued next."""

    def __init__(self, device):
        self.on_host = time.perf_counter()
        self.on_device = _now_on(device)


class StepInFlight:
    """A step that is enqueued, and may still be on its way on the device: as train_gpt times it."""

    def __init__(self, start, loss):
        self.start = start
        self.on_host = loss
        if loss.is_cuda:
            self.on_host = torch.empty_like(loss, device="cpu", pin_memory=True)
            self.on_host.copy_(loss, non_blocking=True)
        self.enqueued = time.perf_counter()
        self.ended = _now_on(loss.device)

    def seconds(self):
        """Waits for it."""
        if self.ended is None:
            return self.enqueued - self.start.on_host
        self.ended.synchronize()
        return self.start.on_device.elapsed_time(self.ended) * 1e-3


def _run_steps(arguments, data, step):
    """The seconds and the losses by step. The loss of one is read while a device works at the next."""
    device = device_of(arguments)
    step_seconds, losses = [], []

    def finish(flying):
        step_seconds.append(flying.seconds())
        losses.append(flying.on_host.item())

    before = None
    for index in range(arguments.steps):
        inputs, targets = data.step(index)
        start = StepStart(device)
        loss = step(inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True))
        enqueued = StepInFlight(start, loss)
        if arguments.device == "cpu":
            finish(enqueued)
            continue
        if before is not None:
            finish(before)
        before = enqueued
    if before is not None:
        finish(before)
    return step_seconds, losses


def _run_rank(rank, arguments, build, data_ranks, all_done):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(arguments.threads)
    _meet(arguments)
    data = gpt.TrainingData(arguments.data, arguments, rank % data_ranks, data_ranks)

    base_bytes = reset_rss_peak()
    step = build(arguments)
    step_seconds, losses = _run_steps(arguments, data, step)
    memory = {"rank": rank, "rss_base_bytes": base_bytes, "rss_peak_bytes": rss_peak()}
    if arguments.device == "cuda":
        # Of the requested sizes, as our ledger counts; max_memory_allocated rounds each up to 512.
        memory["peak_bytes"] = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        memory["allocated_peak_bytes"] = torch.cuda.max_memory_allocated()

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
