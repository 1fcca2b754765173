"""ResNet-18 on Fashion-MNIST by PyTorch's DistributedDataParallel, as a careful user writes it: what examples/train_resnet trains, with
its initial weights, its order of the samples and its random numbers, so that the losses are the same. torchrun starts it."""

import argparse
import gzip
import json
import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

MEAN, DEVIATION, PADDING, SIDE = 0.2860, 0.3530, 4, 28
WARM_UP_STEPS = 2
MASK = 2**64 - 1


def splitmix64(x):
    z = (x + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


class SampleRandom:
    """As include/zeropage/data/random.h has it."""

    def __init__(self, seed, epoch, sample):
        self.stream = splitmix64((splitmix64((splitmix64(seed) + epoch) & MASK) + sample) & MASK)
        self.draws = 0

    def of(self, place):
        other = SampleRandom.__new__(SampleRandom)
        other.stream, other.draws = splitmix64(self.stream ^ splitmix64(place)), 0
        return other

    def below(self, count):
        self.draws += 1
        return splitmix64((self.stream + self.draws - 1) & MASK) % count

    def coin(self):
        self.draws += 1
        return splitmix64((self.stream + self.draws - 1) & MASK) >> 63 == 0


class BasicBlock(nn.Module):
    def __init__(self, channels, channels_out, stride):
        super().__init__()
        self.conv1, self.norm1 = convolution(channels, channels_out, 3, stride), nn.BatchNorm2d(channels_out)
        self.conv2, self.norm2 = convolution(channels_out, channels_out, 3, 1), nn.BatchNorm2d(channels_out)
        self.shortcut = nn.Identity()
        if stride != 1 or channels != channels_out:
            self.shortcut = nn.Sequential(convolution(channels, channels_out, 1, stride), nn.BatchNorm2d(channels_out))

    def forward(self, x):
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem, self.norm = convolution(1, width, 3, 1), nn.BatchNorm2d(width)
        stages, channels = [], width
        for times in (1, 2, 4, 8):
            stages += [BasicBlock(channels, width * times, 1 if times == 1 else 2), BasicBlock(width * times, width * times, 1)]
            channels = width * times
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, 10)

    def forward(self, x):
        return self.head(self.stages(torch.relu(self.norm(self.stem(x)))).mean((2, 3)))


def convolution(channels, channels_out, kernel, stride):
    made = nn.Conv2d(channels, channels_out, kernel, stride, kernel // 2, bias=False)
    nn.init.kaiming_normal_(made.weight, 0, "fan_out", "relu")
    return made


class Augmented(Dataset):
    def __init__(self, folder, seed):
        images = gzip.open(folder / "train-images-idx3-ubyte.gz").read()
        labels = gzip.open(folder / "train-labels-idx1-ubyte.gz").read()
        self.images = torch.frombuffer(bytearray(images[16:]), dtype=torch.uint8).view(-1, 1, SIDE, SIDE)
        self.labels = torch.frombuffer(bytearray(labels[8:]), dtype=torch.uint8).long()
        self.seed = seed

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, sample):
        random = SampleRandom(self.seed, 0, sample)
        crop, flip = random.of(0), random.of(1)
        image = nn.functional.pad(self.images[sample], (PADDING,) * 4)
        top, left = crop.below(2 * PADDING + 1), crop.below(2 * PADDING + 1)
        image = image[:, top:top + SIDE, left:left + SIDE]
        if flip.coin():
            image = image.flip(2)
        return (image.float().div_(255) - MEAN).div_(DEVIATION), self.labels[sample]


def batches_of(samples, arguments, rank, ranks):
    """This rank's sample numbers by step, in the order of epoch 0."""
    order, random = list(range(samples)), SampleRandom(arguments.seed, 0, -1)
    for place in range(samples - 1, 0, -1):
        other = random.below(place + 1)
        order[place], order[other] = order[other], order[place]
    own = arguments.batch // ranks
    starts = (step * arguments.batch + rank * own for step in range(min(arguments.steps, samples // arguments.batch)))
    return [order[start:start + own] for start in starts]


def train(arguments):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = Augmented(arguments.data, arguments.seed)
    loader = DataLoader(data, batch_sampler=batches_of(len(data), arguments, rank, ranks), num_workers=1, prefetch_factor=4,
                        persistent_workers=True)
    torch.manual_seed(arguments.seed)
    model = DistributedDataParallel(ResNet18(arguments.width), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    all_steps = arguments.epochs * (len(data) // arguments.batch)
    seconds, losses = [], []
    batches = iter(loader)
    for step in range(arguments.steps):
        start = time.perf_counter()
        inputs, targets = next(batches)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (1 + math.cos(math.pi * step / all_steps)) / 2
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        outputs.argmax(1).eq(targets).sum().item()
        seconds.append(time.perf_counter() - start)
    of_ranks = torch.tensor(losses[-1], dtype=torch.float64)
    dist.all_reduce(of_ranks)
    return {"seconds": sum(seconds[WARM_UP_STEPS:]) / (arguments.steps - WARM_UP_STEPS), "loss": of_ranks.item() / ranks}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("threads", 1), ("steps", 30), ("width", 16), ("batch", 64), ("epochs", 5), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dist.init_process_group("gloo")
    figures = train(arguments)
    if dist.get_rank() == 0:
        arguments.json.write_text(json.dumps(figures))
    dist.barrier()
    # Not through the destructors, which may hang (ranks.py).
    os._exit(0)


if __name__ == "__main__":
    main()
