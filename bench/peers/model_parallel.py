"""ResNet-50 over ranks with torch.distributed.pipelining: on one rank, naive, and pipelined by split size, as
examples/model_parallel measures it. Writes the figures that examples/model_parallel --draw reads."""

import argparse
import json
import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torchvision.models import resnet50

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
LEARNING_RATE = 0.05


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("ranks", 2), ("threads", 1), ("batch", 96), ("image-side", 64), ("classes", 1000),
                          ("steps", 2), ("rounds", 3), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--schedule", choices=SCHEDULES, default="gpipe")
    parser.add_argument("--split-sizes", default="4,8,16,24,32,48")
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args()
    arguments.split_sizes = [int(text) for text in arguments.split_sizes.split(",")]
    for split in arguments.split_sizes:
        if split < 1 or split >= arguments.batch or arguments.batch % split:
            parser.error(f"--split-sizes {split}: expected a smaller divisor of --batch {arguments.batch}")
    return arguments


def make(arguments):
    torch.manual_seed(arguments.seed)
    return resnet50(num_classes=arguments.classes)


def stage_of(net, rank, count):
    """The layers of one rank, cut as Zeropage cuts them: the stem, each block, the head."""
    stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
    blocks = [block for layer in (net.layer1, net.layer2, net.layer3, net.layer4) for block in layer]
    head = nn.Sequential(net.avgpool, nn.Flatten(), net.fc)
    layers = [stem, *blocks, head]
    each, longer = divmod(len(layers), count)
    first = rank * each + min(rank, longer)
    return nn.Sequential(*layers[first : first + each + (rank < longer)])


def batch_for(arguments):
    generator = torch.Generator().manual_seed(arguments.seed + 1)
    side = arguments.image_side
    images = torch.randn(arguments.batch, 3, side, side, generator=generator)
    return images, torch.randint(arguments.classes, (arguments.batch,), generator=generator)


def one_rank(arguments, images, labels):
    """The function of one step, which returns the loss."""
    net = make(arguments)
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def over_ranks(arguments, images, labels, split_size):
    rank, count = dist.get_rank(), arguments.ranks
    stage = stage_of(make(arguments), rank, count)
    micro_batches = arguments.batch // split_size
    kind = SCHEDULES[arguments.schedule] if micro_batches > 1 else ScheduleGPipe
    schedule = kind(PipelineStage(stage, rank, count, torch.device("cpu")), micro_batches, F.cross_entropy)
    optimizer = torch.optim.SGD(stage.parameters(), lr=LEARNING_RATE)

    def step():
        optimizer.zero_grad(set_to_none=True)
        losses = []
        is_last = rank == count - 1
        schedule.step(
            *([images] if rank == 0 else []),
            **({"target": labels, "losses": losses} if is_last else {}),
            return_outputs=False,
        )
        optimizer.step()
        # All ranks know the loss, as Zeropage's do.
        loss = torch.stack(losses).mean().detach() if is_last else torch.zeros(())
        dist.broadcast(loss, count - 1)
        return loss.item()

    return step


def measure(arguments, way, split_size, images, labels):
    """Images a second and the loss after the last step, by rank 0."""
    dist.barrier()
    seconds, loss = 1.0, 0.0
    if way != "single" or dist.get_rank() == 0:
        step = (one_rank(arguments, images, labels) if way == "single" else
                over_ranks(arguments, images, labels, split_size))
        step()
        begin = time.perf_counter()
        for _ in range(arguments.steps):
            loss = step()
        seconds = time.perf_counter() - begin
    return arguments.batch * arguments.steps / seconds, loss


def run_rank(rank, arguments, all_done):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(arguments.threads)
    dist.init_process_group("gloo")
    images, labels = batch_for(arguments)
    ways = [("single", arguments.batch), ("naive", arguments.batch)]
    ways += [(f"split {split}", split) for split in arguments.split_sizes]
    # Memory is not measured: the ways of a process leave their heaps to each other.
    figures = {way: {"way": way, "split_size": split, "images_per_second": [], "peak_bytes": 0, "loss": 0.0}
               for way, split in ways}
    for number in range(arguments.rounds):
        for way, split in ways if number % 2 == 0 else reversed(ways):
            rate, loss = measure(arguments, way, split, images, labels)
            figures[way]["images_per_second"].append(rate)
            figures[way]["loss"] = loss
    if rank == 0:
        result = {"name": f"PyTorch {torch.__version__.split('+')[0]}", "ranks": arguments.ranks,
                  "batch": arguments.batch, "image_side": arguments.image_side, "width": 64,
                  "ways": list(figures.values())}
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    all_done.wait()
    os._exit(0)  # as in ranks.py


def main():
    arguments = parse_arguments()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(arguments.ranks),
                      OMP_NUM_THREADS=str(arguments.threads))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    all_done = torch.multiprocessing.get_context("spawn").Barrier(arguments.ranks)
    torch.multiprocessing.spawn(run_rank, (arguments, all_done), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
