"""Times AdamW steps of one optimizer of Python over one flat fp32 parameter on the host."""

import argparse
import json
import os
import time
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"  # the import of DeepSpeed reads it

import torch

LR, WEIGHT_DECAY = 1e-3, 1e-2


def deepspeed_cpu_adam(parameters):
    # Compiles its operator where that was not done yet, for this processor.
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(parameters, lr=LR, weight_decay=WEIGHT_DECAY, adamw_mode=True)


OPTIMIZERS = {
    "deepspeed": deepspeed_cpu_adam,
    "fused": lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=WEIGHT_DECAY, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=WEIGHT_DECAY, foreach=True),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizer", required=True, choices=OPTIMIZERS)
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    parameter = torch.nn.Parameter(torch.randn(arguments.numel))
    parameter.grad = torch.randn(arguments.numel)
    optimizer = OPTIMIZERS[arguments.optimizer]([parameter])
    seconds = []
    for _ in range(arguments.steps):
        begin = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    arguments.json.write_text(json.dumps({"step_seconds": seconds}))


if __name__ == "__main__":
    main()
