"""The model, its initial weights and its data, number for number as examples/train_gpt has them.

The order in which parameters are registered matters: both sides seed the generator and draw the
weights in that order. Shapes: B batch, T sequence, D d_model, H heads, V vocabulary.
"""

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 257  # the bytes and an end-of-text token
END_OF_TEXT = 256
MASK64 = 2**64 - 1


class Block(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(d_model)
        self.attention_qkv = nn.Linear(d_model, 3 * d_model)
        self.attention_out = nn.Linear(d_model, d_model)
        self.mlp_norm = nn.LayerNorm(d_model)
        self.mlp_up = nn.Linear(d_model, 4 * d_model)
        self.mlp_down = nn.Linear(4 * d_model, d_model)

    def forward(self, x):  # [B, T, D]
        x = x + self.attend(self.attention_norm(x))
        return x + self.mlp_down(F.gelu(self.mlp_up(self.mlp_norm(x))))

    def attend(self, x):
        b, t, d = x.shape
        heads = [
            part.view(b, t, self.heads, d // self.heads).transpose(1, 2)  # [B, H, T, D / H]
            for part in self.attention_qkv(x).chunk(3, -1)
        ]
        attention = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.attention_out(attention.transpose(1, 2).reshape(b, t, d))


class Gpt(nn.Module):
    """Pre-LN GPT with a tied head: tokens [B, T] to logits [B, T, V]."""

    def __init__(self, d_model, layers, heads, sequence):
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, d_model)
        self.position_embedding = nn.Embedding(sequence, d_model)
        self.blocks = nn.ModuleList(Block(d_model, heads) for _ in range(layers))
        self.final_norm = nn.LayerNorm(d_model)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.final_norm(x), self.token_embedding.weight)


@torch.no_grad()
def initialise(model, seed, whole=nullcontext):
    """`whole(parameter)` is a context whose value is the whole parameter, to be written to."""
    torch.manual_seed(seed)
    residual_std = 0.02 / math.sqrt(2 * len(model.blocks))
    for name, sharded in model.named_parameters():
        with whole(sharded) as parameter:
            if parameter.dim() >= 2:
                into_residual = name.endswith(("attention_out.weight", "mlp_down.weight", "mlp.w_down"))
                parameter.normal_(0, residual_std if into_residual else 0.02)
            else:
                parameter.fill_(1 if name.endswith("norm.weight") else 0)


def empty(arguments):
    """The model without the weights of `initialise`."""
    return Gpt(arguments.d_model, arguments.layers, arguments.heads, arguments.sequence)


def build(arguments):
    model = empty(arguments)
    initialise(model, arguments.seed)
    return model


def loss(logits, targets):
    return F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.view(-1))


def splitmix64(x):
    z = (x + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


class TrainingData:
    """The samples of one of `ranks` that have samples of their own. The last 5 % of the tokens are held
    out and never drawn."""

    def __init__(self, path, arguments, rank, ranks):
        with open(path, "rb") as file:
            text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
        tokens = torch.cat([text.short(), torch.tensor([END_OF_TEXT], dtype=torch.int16)])
        self.sequence = arguments.sequence
        self.batch = arguments.batch
        self.seed = arguments.seed
        self.rank = rank
        self.world_size = ranks
        held_out = max(self.sequence + 1, len(tokens) // 20)
        self.train_numel = len(tokens) - held_out
        if self.train_numel <= self.sequence:
            raise ValueError(
                f"{path}: {len(tokens)} tokens, {held_out} of them held out, leave no sample of "
                f"{self.sequence} + 1 tokens; give a longer file or a smaller --sequence"
            )
        self.tokens = tokens[: self.train_numel]

    def offset(self, sample):
        """Where the sample of global index `sample` starts."""
        draw = splitmix64((splitmix64(self.seed) + sample) & MASK64)
        return draw % (self.train_numel - self.sequence)

    def step(self, index):
        """Inputs and targets of step `index`: two int64 tensors [B, T]."""
        first = (index * self.world_size + self.rank) * self.batch
        offsets = [self.offset(first + b) for b in range(self.batch)]
        rows = [self.tokens[o : o + self.sequence + 1] for o in offsets]
        window = torch.stack(rows).long()  # [B, T + 1]
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()
