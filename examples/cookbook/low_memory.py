import copy

import torch
from torch import nn
from torch.nn import functional as F

STEPS, BATCH = 12, 24
TOKENS, WIDTH, HEADS, KEY_HEADS, HEAD, INNER = 64, 64, 8, 4, 8, 128
BLOCKS, LENGTH = 4, 16


def rotated(x, table):
    a, b = x.chunk(2, -1)
    return torch.cat([a * table[0] - b * table[1], b * table[0] + a * table[1]], -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.queries = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.keys = nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False)
        self.values = nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.second_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def attention(self, x, table):
        def heads(linear):
            return linear(x).view(x.size(0), x.size(1), -1, HEAD).transpose(1, 2)

        def shared(t):
            return t.repeat_interleave(HEADS // KEY_HEADS, 1)

        q, k, v = rotated(heads(self.queries), table), rotated(heads(self.keys), table), heads(self.values)
        mixed = F.scaled_dot_product_attention(q, shared(k), shared(v), is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x, table):
        y = x + self.attention(self.first_norm(x), table)
        z = self.second_norm(y)
        return y + self.down(F.silu(self.gate(z)) * self.up(z))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        nn.init.normal_(self.embedding.weight, 0, 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        rates = torch.pow(10000.0, -torch.arange(0, HEAD, 2) / HEAD)
        angles = torch.outer(torch.arange(LENGTH), rates)
        self.table = torch.stack([angles.cos(), angles.sin()])

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.table)
        return F.linear(self.norm(x), self.embedding.weight)


def samples_of(number):
    generator = torch.Generator().manual_seed(number)
    first = torch.randint(TOKENS, (BATCH, 1), generator=generator)
    by = torch.randint(1, 8, (BATCH, 1), generator=generator)
    return (first + by * torch.arange(LENGTH + 1)).remainder(TOKENS)


torch.manual_seed(1)
exact = Llama()
llama = copy.deepcopy(exact).to(torch.bfloat16)
optimizer = torch.optim.AdamW(exact.parameters(), lr=3e-3)
for step in range(1, STEPS + 1):
    tokens = samples_of(step)
    loss = F.cross_entropy(llama(tokens[:, :LENGTH]).float().flatten(0, 1), tokens[:, 1:].flatten())
    llama.zero_grad()
    loss.backward()
    for master, p in zip(exact.parameters(), llama.parameters()):
        master.grad = p.grad.float()
    norm = nn.utils.clip_grad_norm_(exact.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(exact.parameters(), llama.parameters()):
            p.copy_(master)
    if step % 4 == 0:
        print(f"step {step:3d}  norm {norm:.4f}  loss {loss:.4f}")
