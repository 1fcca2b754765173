"""DeepSpeed ZeRO on the host over Gloo, as a careful user writes it."""

import os
from contextlib import contextmanager

os.environ["DS_ACCELERATOR"] = "cpu"  # the import reads it

import deepspeed

# deepspeed.initialize imports this: 43 MiB of code, which counts to the base.
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

import gpt
import ranks
import trainer


@contextmanager
def whole(parameter):
    with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
        yield parameter


def configuration(arguments):
    zero = {"stage": int(arguments.options["stage"])}
    if arguments.options["buckets"] == "block":
        block_numel = 12 * arguments.d_model**2 + 13 * arguments.d_model
        zero |= {
            "reduce_bucket_size": block_numel,
            "allgather_bucket_size": block_numel,
            "stage3_prefetch_bucket_size": block_numel,
            "stage3_max_reuse_distance": block_numel,
            # The block that computes and the one that comes.
            "stage3_max_live_parameters": 2 * block_numel,
        }
    return {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "gradient_clipping": 0.0,  # nobody else clips; DeepSpeed would, to 1.0
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }


def sharded_model(arguments, config):
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = gpt.empty(arguments)
    gpt.initialise(model, arguments.seed, whole)
    # The head uses the tied weight in the model's own forward.
    deepspeed.zero.register_external_parameter(model, model.token_embedding.weight)
    return model


def build(arguments):
    if arguments.device != "cpu" or arguments.compute_dtype != "fp32":
        raise ValueError("this peer is set up for --device cpu and --compute-dtype fp32 only")
    # Without a compiler: of its native operators, only one of inference would be built here.
    deepspeed.ops.__compatible_ops__ = {}
    config = configuration(arguments)
    stage = config["zero_optimization"]["stage"]
    model = sharded_model(arguments, config) if stage == 3 else gpt.build(arguments)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=trainer.adamw(model, arguments), config=config
    )

    def step(inputs, targets):
        loss = gpt.loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()  # zeroes the gradients too
        return loss.detach()

    return step


if __name__ == "__main__":
    ranks.main(__doc__, "deepspeed", build)
