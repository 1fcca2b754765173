"""PyTorch DistributedDataParallel over Gloo, as a careful user writes it."""

from torch.nn.parallel import DistributedDataParallel

import gpt
import ranks
import trainer


def build(arguments):
    model = DistributedDataParallel(
        gpt.build(arguments),
        gradient_as_bucket_view=arguments.options["gradient_as_bucket_view"] == "on",
    )
    return trainer.train_step(model, trainer.adamw(model, arguments))


if __name__ == "__main__":
    ranks.main(__doc__, "ddp", build)
