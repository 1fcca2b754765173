"""The loop of eager.py whose forward, loss and backward torch.compile compiles as one; compiling belongs to the first steps, which
are not measured."""

import torch

import gpt
import ranks
import trainer


def build(arguments):
    if arguments.ranks != 1:
        raise ValueError(f"this peer is a loop without communication: it has one rank, got --ranks {arguments.ranks}")
    model = gpt.build(arguments).to(ranks.device_of(arguments))
    optimizer = trainer.adamw(model, arguments)
    is_low = arguments.compute_dtype == "bf16"

    @torch.compile(mode=arguments.options["mode"], fullgraph=True, dynamic=False)
    def loss_of(inputs, targets):
        with torch.autocast(arguments.device, torch.bfloat16, is_low):
            return gpt.loss(model(inputs), targets)

    def step(inputs, targets):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(inputs, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


if __name__ == "__main__":
    ranks.main(__doc__, "compiled", build)
