"""A GPT with a mixture of experts in each block under PyTorch FSDP2 (fully_shard), as a careful user writes it: experts' weights are
stacked, a router chooses for each token, and a loop runs each expert on the tokens that chose it. Whole blocks are gathered."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp2
import gpt
import ranks
import trainer


class Experts(nn.Module):
    """[B, T, D] to [B, T, D]; E experts of H features, of which a token takes K."""

    def __init__(self, d_model, hidden, experts, active):
        super().__init__()
        self.active = active
        self.router = nn.Parameter(torch.empty(experts, d_model))
        self.w_up = nn.Parameter(torch.empty(experts, hidden, d_model))
        self.w_down = nn.Parameter(torch.empty(experts, d_model, hidden))

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        scores = torch.softmax(F.linear(tokens, self.router), -1)
        weights, chosen = scores.topk(self.active, -1)  # [tokens, K]
        weights = weights / weights.sum(-1, keepdim=True)
        result = torch.zeros_like(tokens)
        # unbind, whose gradient is one stack: that of an index is a zeroed tensor of all experts for each of them.
        for expert, (w_up, w_down) in enumerate(zip(self.w_up.unbind(), self.w_down.unbind())):
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            hidden = F.gelu(F.linear(tokens[rows], w_up))
            output = F.linear(hidden, w_down) * weights[rows, place, None]
            result.index_add_(0, rows, output)
        return result.view(x.shape)


class Block(gpt.Block):
    def __init__(self, arguments):
        super().__init__(arguments.d_model, arguments.heads)
        del self.mlp_up, self.mlp_down
        experts, active = (int(arguments.options[name]) for name in ("experts", "active"))
        self.mlp = Experts(arguments.d_model, 4 * arguments.d_model // active, experts, active)

    def forward(self, x):  # [B, T, D]
        x = x + self.attend(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Gpt(gpt.Gpt):
    def __init__(self, arguments):
        super().__init__(arguments.d_model, 0, arguments.heads, arguments.sequence)
        self.blocks = nn.ModuleList(Block(arguments) for _ in range(arguments.layers))


def build(arguments):
    if arguments.device != "cpu" or arguments.compute_dtype != "fp32":
        raise ValueError("this peer is set up for --device cpu and --compute-dtype fp32 only")
    mesh = init_device_mesh(arguments.device, (arguments.ranks,))
    with torch.device("meta"):
        model = Gpt(arguments)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    model.to_empty(device=ranks.device_of(arguments))
    gpt.initialise(model, arguments.seed, fsdp2.whole)
    return trainer.train_step(model, trainer.adamw(model, arguments))


if __name__ == "__main__":
    ranks.main(__doc__, "experts", build)
