import copy

import torch
from torch import nn
from torch.nn import functional as F

STEPS, MICRO_STEPS, BATCH = 60, 2, 32


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.norm = nn.LayerNorm(64)
        self.last = nn.Linear(64, 1)

    def forward(self, x):
        return self.last(F.gelu(self.norm(F.gelu(self.first(x)))))


def samples_of(number):
    return torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(number))


def loss_on(net, x):
    return F.mse_loss(net(x), torch.tanh(x[:, :1] - x[:, 1:2]))


torch.manual_seed(1)
net = Net()
average = copy.deepcopy(net)
decayed = [p for p in net.parameters() if p.dim() > 1]
others = [p for p in net.parameters() if p.dim() <= 1]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 0.5 ** (max(steps - 1, 0) // 20))

for step in range(STEPS):
    optimizer.zero_grad()
    for micro in range(MICRO_STEPS):
        (loss_on(net, samples_of(step * MICRO_STEPS + micro)) / MICRO_STEPS).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    with torch.no_grad():
        for kept, p in zip(average.parameters(), net.parameters()):
            kept.mul_(0.9).add_(p, alpha=0.1)
        if (step + 1) % 20 == 0:
            loss = loss_on(average, samples_of(1_000_000))
            print(f"step {step + 1:3d}  norm {norm:.4f}  loss of the average {loss:.4f}")
