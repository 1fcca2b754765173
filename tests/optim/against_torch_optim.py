#!/usr/bin/env python3
"""Compares zeropage::Muon and zeropage::Adafactor with PyTorch's own torch.optim.Muon and torch.optim.Adafactor, over ten steps.

  against_torch_optim.py STEP_MATRIX

PyTorch's Muon iterates in bf16; here its own code does so in fp32, since bf16 alone would be 1e-2 apart. Prints the largest relative
difference of the values after each ten steps; exits with 1 where one is above 1e-6.

The wheel of torch is linked with CUDA's libraries. Their stand-ins have no functions, so what needs one is bound when it is called.
"""

import ctypes
import os
import subprocess
import sys
import warnings

sys.setdlopenflags(os.RTLD_LAZY)
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch  # noqa: E402

STEPS = 10
BOUND = 1e-6
SHAPES = [(64, 64), (128, 300), (300, 128), (1, 9), (9, 1)]


def optimizer_of(name, value):
    if name == "muon":
        return torch.optim.Muon([value], lr=0.02)
    if name == "muon-match":
        return torch.optim.Muon([value], lr=0.01, adjust_lr_fn="match_rms_adamw", nesterov=False, weight_decay=0.3)
    return torch.optim.Adafactor([value], lr=0.03, weight_decay=0.1)


def pythons(name, value, gradients):
    value = value.clone().requires_grad_()
    optimizer = optimizer_of(name, value)
    after = []
    for gradient in gradients:
        value.grad = gradient.clone()
        optimizer.step()
        after.append(value.detach().clone())
    return torch.stack(after)


def ours(program, name, value, gradients):
    shape = list(value.shape) + [0] * (2 - value.dim())
    numbers = torch.cat([value.view(-1), *(gradient.reshape(-1) for gradient in gradients)])
    result = subprocess.run([program, name, *map(str, shape), str(len(gradients))], check=True, stdout=subprocess.PIPE,
                            input=ctypes.string_at(numbers.data_ptr(), numbers.nbytes))
    return torch.frombuffer(bytearray(result.stdout), dtype=torch.float32).view(len(gradients), *value.shape)


def largest_difference(program, name, shape):
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    value = torch.randn(shape, generator=generator)
    gradients = [torch.randn(shape, generator=generator) for _ in range(STEPS)]
    expected = pythons(name, value, gradients)[-1].double()
    actual = ours(program, name, value, gradients)[-1].double()
    return ((expected - actual).norm() / expected.norm()).item()


def main():
    (program,) = sys.argv[1:]
    torch.set_num_threads(1)
    # A copy, as bfloat16() makes, since what follows is in place.
    torch.Tensor.bfloat16 = lambda tensor: tensor.float().clone()
    failed = False
    for name in ["muon", "muon-match", "adafactor"]:
        for shape in [*SHAPES, (37,)] if name == "adafactor" else SHAPES:
            difference = largest_difference(program, name, shape)
            print(f"{name} {list(shape)}: {difference:.2e}")
            failed = failed or not difference <= BOUND
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
