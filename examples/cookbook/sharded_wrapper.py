import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

STEPS, MICRO_STEPS, WARM_UP = 100, 2, 10
BATCH, TOKENS, LENGTH = 24, 64, 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 32)
        self.up = nn.Linear(LENGTH * 32, 128)
        self.mix = nn.Linear(128, 128)
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, TOKENS)

    def forward(self, tokens):
        x = F.gelu(self.up(self.embedding(tokens).flatten(1)))
        return self.head(self.norm(x + F.gelu(self.mix(x))))


def samples_of(number):
    generator = torch.Generator().manual_seed(number)
    first = torch.randint(TOKENS, (BATCH, 1), generator=generator)
    by = torch.randint(1, 8, (BATCH, 1), generator=generator)
    return (first + by * torch.arange(LENGTH + 1)).remainder(TOKENS)


def loss_on(net, tokens):
    return F.cross_entropy(net(tokens[:, :LENGTH]), tokens[:, LENGTH])


def learning_rate_at(step):
    if step < WARM_UP:
        return 5e-3 * (step + 1) / WARM_UP
    done = (step - WARM_UP) / (STEPS - WARM_UP)
    return 5e-4 + 4.5e-3 * (1 + math.cos(math.pi * done)) / 2


torch.manual_seed(1)
net = Net()
average = copy.deepcopy(net)
decayed = [p for p in net.parameters() if p.dim() > 1]
others = [p for p in net.parameters() if p.dim() <= 1]
optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0}])

for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate_at(step)
    for micro in range(MICRO_STEPS):
        (loss_on(net, samples_of(step * MICRO_STEPS + micro)) / MICRO_STEPS).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for kept, p in zip(average.parameters(), net.parameters()):
            kept.mul_(0.9).add_(p, alpha=0.1)
        if (step + 1) % 20 == 0:
            loss = loss_on(average, samples_of(1_000_000))
            print(f"step {step + 1:3d}  norm {norm:.4f}  loss of the average {loss:.4f}")
