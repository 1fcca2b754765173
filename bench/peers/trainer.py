"""What the peers share in training: the optimizer, and the step of those that are plain PyTorch."""

import torch

import gpt


def adamw(model, arguments):
    implementation = {"fused": True} if arguments.options["adamw"] == "fused" else {}
    return torch.optim.AdamW(model.parameters(), lr=arguments.lr, **implementation)


def train_step(model, optimizer):
    """The function `step(inputs, targets) -> loss` that ranks.launch wants of a peer's build."""

    def step(inputs, targets):
        optimizer.zero_grad(set_to_none=True)
        loss = gpt.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
