"""PyTorch's torch.distributed.pipelining over all ranks, as a careful user writes it: each rank has a part of the blocks,
and the tied weight lies on the first and the last rank, which add up its gradients."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import flags
import gpt
import ranks
import trainer

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Stage(nn.Module):
    """This rank's part of gpt.Gpt, with the names of the whole."""

    def __init__(self, arguments, rank):
        super().__init__()
        d, last = arguments.d_model, arguments.ranks - 1
        first_block = arguments.layers * rank // arguments.ranks
        end_block = arguments.layers * (rank + 1) // arguments.ranks
        self.is_first, self.is_last = rank == 0, rank == last
        if self.is_first or self.is_last:
            self.token_embedding = nn.Embedding(gpt.VOCABULARY, d)
        if self.is_first:
            self.position_embedding = nn.Embedding(arguments.sequence, d)
        blocks = range(first_block, end_block)
        self.blocks = nn.ModuleDict({str(i): gpt.Block(d, arguments.heads) for i in blocks})
        if self.is_last:
            self.final_norm = nn.LayerNorm(d)

    def forward(self, x):
        if self.is_first:
            positions = torch.arange(x.shape[1], device=x.device)
            x = self.token_embedding(x) + self.position_embedding(positions)
        for block in self.blocks.values():
            x = block(x)
        return F.linear(self.final_norm(x), self.token_embedding.weight) if self.is_last else x


def initialise(stage, arguments):
    """The values of gpt.py: every rank draws those of the whole model, and keeps its own."""
    with torch.device("meta"):
        reference = gpt.empty(arguments)
    names = {parameter: name for name, parameter in reference.named_parameters()}
    own = dict(stage.named_parameters())

    @contextmanager
    def whole(parameter):
        tensor = torch.empty(parameter.shape)
        yield tensor
        if names[parameter] in own:
            with torch.no_grad():
                own[names[parameter]].copy_(tensor)

    gpt.initialise(reference, arguments.seed, whole)


def build(arguments):
    if arguments.device != "cpu" or arguments.compute_dtype != "fp32":
        raise ValueError("this peer is set up for --device cpu and --compute-dtype fp32 only")
    rank, last = dist.get_rank(), arguments.ranks - 1
    ends = dist.new_group([0, last])
    stage = Stage(arguments, rank)
    initialise(stage, arguments)
    schedule = SCHEDULES[arguments.options["schedule"]](
        PipelineStage(stage, rank, arguments.ranks, torch.device("cpu")),
        n_microbatches=int(arguments.options["micro_batches"]),
        loss_fn=gpt.loss,
    )
    optimizer = trainer.adamw(stage, arguments)

    def step(inputs, targets):
        optimizer.zero_grad(set_to_none=True)
        losses = []
        schedule.step(
            *([inputs] if stage.is_first else []),
            **({"target": targets, "losses": losses} if stage.is_last else {}),
            return_outputs=False,
        )
        if stage.is_first or stage.is_last:
            dist.all_reduce(stage.token_embedding.weight.grad, group=ends)
        optimizer.step()
        # The mean over ranks is to be the loss, which the last one knows.
        return torch.stack(losses).mean().detach() * arguments.ranks if losses else torch.zeros(())

    return step


if __name__ == "__main__":
    chosen = flags.peer_arguments(__doc__, "pipeline")
    # A step has so many samples for each micro-batch.
    chosen.batch *= int(chosen.options["micro_batches"])
    ranks.launch(chosen, build, data_ranks=1)
