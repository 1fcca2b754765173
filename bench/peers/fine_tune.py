"""Fine-tunes a Llama of Hugging Face's files in plain PyTorch, by DistributedDataParallel or FSDP2, as a careful user writes it, on batches
that bench/fine_tune wrote. One rank of it, started by bench/fine_tune.py."""

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

# See ranks.py: part of the base.
import torch._dynamo  # noqa: F401
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ranks import reset_rss_peak, rss_peak


class RmsNorm(nn.Module):
    def __init__(self, width, epsilon):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.epsilon = epsilon

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.epsilon)


def rotated(x, cosines, sines):
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat([-second, first], -1) * sines


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head = config["head_dim"]
        queries, keys = config["num_attention_heads"] * self.head, config["num_key_value_heads"] * self.head
        self.q_proj = nn.Linear(config["hidden_size"], queries, bias=False)
        self.k_proj = nn.Linear(config["hidden_size"], keys, bias=False)
        self.v_proj = nn.Linear(config["hidden_size"], keys, bias=False)
        self.o_proj = nn.Linear(queries, config["hidden_size"], bias=False)

    def forward(self, x, cosines, sines):
        q, k, v = (p(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotated(q, cosines, sines), rotated(k, cosines, sines)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config["hidden_size"], config["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(config["hidden_size"], config["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(config["intermediate_size"], config["hidden_size"], bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        norm = lambda: RmsNorm(config["hidden_size"], config["rms_norm_eps"])
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn, self.mlp = Attention(config), Mlp(config)

    def forward(self, x, cosines, sines):
        x = x + self.self_attn(self.input_layernorm(x), cosines, sines)
        return x + self.mlp(self.post_attention_layernorm(x))


class Adapted(nn.Module):
    """A linear layer with a change of low rank, as peft's Linear without dropout computes it."""

    def __init__(self, base, rank, scale):
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, device=base.weight.device)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, device=base.weight.device)
        self.scale = scale

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x)) * self.scale


class Body(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = RmsNorm(config["hidden_size"], config["rms_norm_eps"])


class Llama(nn.Module):
    """With a tied head; [batch, length] -> [batch, length, vocabulary]."""

    def __init__(self, config):
        super().__init__()
        self.model = Body(config)
        self.head, self.theta = config["head_dim"], config["rope_theta"]

    def forward(self, tokens):
        rates = self.theta ** (-torch.arange(0, self.head, 2, dtype=torch.float32) / self.head)
        angles = torch.outer(torch.arange(tokens.shape[1], dtype=torch.float32), rates)
        angles = torch.cat([angles, angles], -1)
        cosines, sines = angles.cos(), angles.sin()
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cosines, sines)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def add_adapters(model, folder):
    """Peft's adapters into the layers that they name; everything else is frozen."""
    config = json.loads((folder / "adapter_config.json").read_text())
    model.requires_grad_(False)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if name in config["target_modules"]:
                    setattr(part, name, Adapted(child, config["r"], config["lora_alpha"] / config["r"]))
    weights = load_file(folder / "adapter_model.safetensors")
    missing = model.load_state_dict({name.removeprefix("base_model.model."): value for name, value in weights.items()}, strict=False)
    if missing.unexpected_keys:
        sys.exit(f"fine_tune.py: {folder}: unexpected {missing.unexpected_keys[:3]}")


def loaded(folder):
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama" or not config["tie_word_embeddings"]:
        sys.exit(f"fine_tune.py: {folder}: expected a llama with a tied head")
    with torch.device("meta"):
        model = Llama(config)
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)
    model.load_state_dict(weights, assign=True)
    return model


def sharded(model, kind):
    if kind == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def rate_at(arguments, step):
    """zp-lm's: linear warm-up, then a cosine down to a share of the highest."""
    if step < arguments.warm_up:
        return arguments.lr * (step + 1) / arguments.warm_up
    done = min(1.0, (step - arguments.warm_up) / max(1, arguments.steps - arguments.warm_up))
    return arguments.lr * (arguments.least_rate + (1 - arguments.least_rate) * (1 + math.cos(math.pi * done)) / 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=["ddp", "fsdp2"], required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batches", type=Path, required=True, help="safetensors with batches [steps, rows, length + 1]")
    parser.add_argument("--adapters", type=Path, help="folder of adapters to train, in peft's form; without it: all weights")
    parser.add_argument("--json", type=Path, required=True)
    for name in ("lr", "least-rate", "weight-decay", "beta1", "beta2", "clip-norm"):
        parser.add_argument("--" + name, type=float, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    batches = load_file(arguments.batches)["batches"]
    base = reset_rss_peak()
    whole = loaded(arguments.model)
    if arguments.adapters:
        add_adapters(whole, arguments.adapters)
    model = sharded(whole, arguments.kind)
    del whole
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": arguments.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=arguments.lr, betas=(arguments.beta1, arguments.beta2), fused=True)
    of_opening = rss_peak()
    reset_rss_peak()
    losses, seconds = [], []
    for step in range(arguments.steps):
        begin = time.perf_counter()
        rows = batches[step].chunk(ranks)[rank]
        for group in optimizer.param_groups:
            group["lr"] = rate_at(arguments, step)
        optimizer.zero_grad(set_to_none=True)
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        del logits
        loss.backward()
        nn.utils.clip_grad_norm_(trained, arguments.clip_norm)
        optimizer.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
        seconds.append(time.perf_counter() - begin)
    # Tensors travel without NumPy, objects do not.
    own = torch.tensor([base, of_opening, rss_peak()])
    all_ranks = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(all_ranks, own)
    if rank == 0:
        peaks = [dict(zip(("base", "opening", "training"), of.tolist())) for of in all_ranks]
        arguments.json.write_text(json.dumps({"loss": losses, "step_seconds": seconds, "memory": peaks}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # ranks.py says why


if __name__ == "__main__":
    main()
