"""The plain PyTorch loop on one rank, nothing wrapped or compiled; in bf16 by autocast, over fp32 parameters."""

import torch

import gpt
import ranks
import trainer


def build(arguments):
    if arguments.ranks != 1:
        raise ValueError(f"this peer is a loop without communication: it has one rank, got --ranks {arguments.ranks}")
    model = gpt.build(arguments).to(ranks.device_of(arguments))
    low = torch.autocast(arguments.device, torch.bfloat16, arguments.compute_dtype == "bf16")
    return trainer.train_step(model, trainer.adamw(model, arguments), low)


if __name__ == "__main__":
    ranks.main(__doc__, "eager", build)
