"""What the peers share in training: the optimizer, and the step of those that are plain PyTorch."""

from contextlib import nullcontext

import torch

import gpt


def adamw(model, arguments):
    fused = arguments.options["adamw"] == "fused" or arguments.device == "cuda"
    implementation = {"fused": True} if fused else {}
    return torch.optim.AdamW(model.parameters(), lr=arguments.lr, **implementation)


def train_step(model, optimizer, forward=nullcontext()):
    """The function `step(inputs, targets) -> loss` that ranks.launch wants of a peer's build; the
    context `forward` surrounds the forward pass and the loss."""

    def step(inputs, targets):
        optimizer.zero_grad(set_to_none=True)
        with forward:
            loss = gpt.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
