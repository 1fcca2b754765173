"""PyTorch DistributedDataParallel, as a careful user writes it; in bf16 by autocast, over fp32 parameters."""

import torch
from torch.nn.parallel import DistributedDataParallel

import gpt
import ranks
import trainer


def build(arguments):
    model = DistributedDataParallel(
        gpt.build(arguments).to(ranks.device_of(arguments)),
        gradient_as_bucket_view=arguments.options["gradient_as_bucket_view"] == "on",
    )
    low = torch.autocast(arguments.device, torch.bfloat16, arguments.compute_dtype == "bf16")
    return trainer.train_step(model, trainer.adamw(model, arguments), low)


if __name__ == "__main__":
    ranks.main(__doc__, "ddp", build)
