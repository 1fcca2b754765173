"""PyTorch DistributedDataParallel over Gloo, as a careful user writes it."""

import torch
from torch.nn.parallel import DistributedDataParallel

import flags
import gpt
import ranks

OPTIONS = {"gradient_as_bucket_view": ("on", "off"), "adamw": ("default", "fused")}


def build(arguments):
    model = DistributedDataParallel(
        gpt.build(arguments),
        gradient_as_bucket_view=arguments.options["gradient_as_bucket_view"] == "on",
    )
    implementation = {"fused": True} if arguments.options["adamw"] == "fused" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, **implementation)

    def step(inputs, targets):
        optimizer.zero_grad(set_to_none=True)
        loss = gpt.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


if __name__ == "__main__":
    ranks.launch(flags.peer_arguments(__doc__, OPTIONS), build)
