"""PyTorch FSDP2 (fully_shard) over Gloo, block by block, as a careful user writes it."""

from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import gpt
import ranks
import trainer


@contextmanager
def whole(parameter):
    """A plain tensor of the whole parameter; what is written to it becomes the shards."""
    tensor = torch.empty(parameter.shape)
    yield tensor
    # Every rank has drawn the same values: there is nothing to send.
    parameter.copy_(
        distribute_tensor(
            tensor, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    )


def build(arguments):
    mesh = init_device_mesh("cpu", (arguments.ranks,))
    reshard = arguments.options["reshard_after_forward"] == "on"
    with torch.device("meta"):
        model = gpt.empty(arguments)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    # The root owns the tied weight and the final norm, which the backward needs first.
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    model.to_empty(device="cpu")
    gpt.initialise(model, arguments.seed, whole)
    return trainer.train_step(model, trainer.adamw(model, arguments))


if __name__ == "__main__":
    ranks.main(__doc__, "fsdp2", build)
