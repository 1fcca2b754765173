"""PyTorch's torch.distributed.tensor.parallel over all ranks, as a careful user writes it: the ranks compute each
sample together."""

from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import gpt
import ranks
import trainer

QKV = ("attention_q", "attention_k", "attention_v")


class Block(nn.Module):
    """That of gpt.py, whose queries, keys and values are three layers: ColwiseParallel cuts one layer into stretches
    of rows, which would not be heads."""

    def __init__(self, d_model, heads):
        super().__init__()
        self.head_width = d_model // heads
        self.attention_norm = nn.LayerNorm(d_model)
        for name in QKV:
            setattr(self, name, nn.Linear(d_model, d_model))
        self.attention_out = nn.Linear(d_model, d_model)
        self.mlp_norm = nn.LayerNorm(d_model)
        self.mlp_up = nn.Linear(d_model, 4 * d_model)
        self.mlp_down = nn.Linear(4 * d_model, d_model)

    def forward(self, x):  # [B, T, D]
        b, t, _ = x.shape
        normed = self.attention_norm(x)
        heads = [
            getattr(self, name)(normed).view(b, t, -1, self.head_width).transpose(1, 2)
            for name in QKV
        ]
        attention = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.attention_out(attention.transpose(1, 2).reshape(b, t, -1))
        return x + self.mlp_down(F.gelu(self.mlp_up(self.mlp_norm(x))))


class Gpt(nn.Module):
    """That of gpt.py, with these blocks."""

    def __init__(self, arguments):
        super().__init__()
        d = arguments.d_model
        self.token_embedding = nn.Embedding(gpt.VOCABULARY, d)
        self.position_embedding = nn.Embedding(arguments.sequence, d)
        self.blocks = nn.ModuleList(Block(d, arguments.heads) for _ in range(arguments.layers))
        self.final_norm = nn.LayerNorm(d)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        x, weight = self.final_norm(x), self.token_embedding.weight
        if isinstance(weight, DTensor):
            x = DTensor.from_local(x, weight.device_mesh, [Replicate()])
        return F.linear(x, weight)


def parallelize(model, mesh, vocabulary):
    plan = {name: ColwiseParallel() for name in (*QKV, "mlp_up")}
    plan |= {name: RowwiseParallel() for name in ("attention_out", "mlp_down")}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    if vocabulary == "sharded":
        sharded = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(model, mesh, {"token_embedding": sharded})


@torch.no_grad()
def assign(parameter, whole):
    # Every rank has drawn the same values: there is nothing to send.
    if isinstance(parameter, DTensor):
        whole = distribute_tensor(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(whole)


def initialise(model, arguments):
    """The values of gpt.py, parameter after parameter in its order."""
    with torch.device("meta"):
        reference = gpt.empty(arguments)
    names = {parameter: name for name, parameter in reference.named_parameters()}
    parameters = dict(model.named_parameters())

    @contextmanager
    def whole(parameter):
        tensor = torch.empty(parameter.shape)
        yield tensor
        name = names[parameter]
        if ".attention_qkv." not in name:
            assign(parameters[name], tensor)
            return
        for part, of_part in zip(QKV, tensor.chunk(len(QKV))):
            assign(parameters[name.replace("attention_qkv", part)], of_part)

    gpt.initialise(reference, arguments.seed, whole)


def build(arguments):
    if arguments.device != "cpu" or arguments.compute_dtype != "fp32":
        raise ValueError("this peer is set up for --device cpu and --compute-dtype fp32 only")
    mesh = init_device_mesh("cpu", (arguments.ranks,))
    vocabulary = arguments.options["vocabulary"]
    with torch.device("meta"):
        model = Gpt(arguments)
    parallelize(model, mesh, vocabulary)
    model.to_empty(device="cpu")
    initialise(model, arguments)
    optimizer = trainer.adamw(model, arguments)
    # Of a sharded vocabulary no rank has all logits, and backward is within it too.
    scope = loss_parallel if vocabulary == "sharded" else nullcontext

    def step(inputs, targets):
        optimizer.zero_grad(set_to_none=True)
        with scope():
            loss = gpt.loss(model(inputs), targets)
            loss.backward()
        optimizer.step()
        loss = loss.detach()
        return loss.to_local() if isinstance(loss, DTensor) else loss

    return step


if __name__ == "__main__":
    ranks.main(__doc__, "tensor_parallel", build, data_ranks=1)
