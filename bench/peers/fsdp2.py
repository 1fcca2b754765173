"""PyTorch FSDP2 (fully_shard), block by block, as a careful user writes it; in bf16 by its policy, over fp32
shards."""

from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
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
            tensor.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    )


def policy(arguments):
    if arguments.compute_dtype == "fp32":
        return MixedPrecisionPolicy()
    reduce = {"bf16": torch.bfloat16, "fp32": torch.float32}[arguments.options["reduce"]]
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)


def build(arguments):
    mesh = init_device_mesh(arguments.device, (arguments.ranks,))
    mixed = policy(arguments)
    reshard = arguments.options["reshard_after_forward"] == "on"
    with torch.device("meta"):
        model = gpt.empty(arguments)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=mixed)
    # The root owns the tied weight and the final norm, which the backward needs first.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=mixed)
    model.to_empty(device=ranks.device_of(arguments))
    gpt.initialise(model, arguments.seed, whole)
    return trainer.train_step(model, trainer.adamw(model, arguments))


if __name__ == "__main__":
    ranks.main(__doc__, "fsdp2", build)
