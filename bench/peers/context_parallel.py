"""Context parallelism in plain PyTorch, as a careful user writes it on the host, where torch.distributed.tensor.experimental
has none: each rank has some tokens of every sample, gathers all ranks' keys and values, and runs
scaled_dot_product_attention for its queries (as Llama 3 was trained). DistributedDataParallel averages gradients."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gpt
import ranks
import trainer


def own_chunks(whole, dim):
    """Chunks r and 2 P - 1 - r of 2 P, so that all ranks have as much to compute under a causal mask."""
    rank, count = dist.get_rank(), dist.get_world_size()
    chunks = whole.chunk(2 * count, dim)
    return torch.cat([chunks[rank], chunks[2 * count - 1 - rank]], dim)


class GatherTokens(torch.autograd.Function):
    """[2, B, H, T / P, D / H] of each rank to [2, B, H, T, D / H] in the order of the sequence."""

    @staticmethod
    def forward(context, own):
        count = dist.get_world_size()
        parts = own.new_empty(count * own.shape[0], *own.shape[1:])
        dist.all_gather_into_tensor(parts, own)
        halves = parts.view(count, *own.shape).unflatten(4, (2, own.shape[3] // 2)).unbind(4)
        return torch.cat([*halves[0].unbind(0), *reversed(halves[1].unbind(0))], 3)

    @staticmethod
    def backward(context, gradient):
        count = dist.get_world_size()
        chunks = gradient.chunk(2 * count, 3)
        by_rank = torch.cat(
            [torch.cat([chunks[rank], chunks[2 * count - 1 - rank]], 3) for rank in range(count)]
        )
        own = gradient.new_empty(by_rank.shape[0] // count, *by_rank.shape[1:])
        dist.reduce_scatter_tensor(own, by_rank)
        return own


def attend(query, key, value):
    """Causal, of this rank's queries [B, H, T / P, D / H] to all keys; each chunk meets those up to its end."""
    rank, count = dist.get_rank(), dist.get_world_size()
    key, value = GatherTokens.apply(torch.stack([key, value])).unbind(0)
    length = query.shape[2] // 2
    outputs = []
    for place, chunk in zip((rank, 2 * count - 1 - rank), query.chunk(2, 2)):
        keys = (place + 1) * length
        mask = torch.ones(length, keys, dtype=torch.bool).tril(keys - length)
        outputs.append(F.scaled_dot_product_attention(
            chunk, key[:, :, :keys], value[:, :, :keys], attn_mask=mask))
    return torch.cat(outputs, 2)


class Block(gpt.Block):
    def forward(self, x):  # [B, T / P, D]
        b, t, d = x.shape
        heads = [
            part.view(b, t, self.heads, d // self.heads).transpose(1, 2)
            for part in self.attention_qkv(self.attention_norm(x)).chunk(3, -1)
        ]
        x = x + self.attention_out(attend(*heads).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp_down(F.gelu(self.mlp_up(self.mlp_norm(x))))


class Gpt(gpt.Gpt):
    def __init__(self, arguments):
        super().__init__(arguments.d_model, 0, arguments.heads, arguments.sequence)
        self.blocks = nn.ModuleList(
            Block(arguments.d_model, arguments.heads) for _ in range(arguments.layers)
        )
        self.positions = own_chunks(torch.arange(arguments.sequence), 0)

    def forward(self, tokens):
        x = self.token_embedding(tokens) + self.position_embedding(self.positions)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.final_norm(x), self.token_embedding.weight)


def build(arguments):
    if arguments.device != "cpu" or arguments.compute_dtype != "fp32":
        raise ValueError("this peer is set up for --device cpu and --compute-dtype fp32 only")
    model = Gpt(arguments)
    gpt.initialise(model, arguments.seed)
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    train = trainer.train_step(model, trainer.adamw(model, arguments))
    return lambda inputs, targets: train(own_chunks(inputs, 1), own_chunks(targets, 1))


if __name__ == "__main__":
    ranks.main(__doc__, "context_parallel", build, data_ranks=1)
