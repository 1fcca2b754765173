#!/usr/bin/env python3
"""Compares examples/language_model with Hugging Face's transformers and peft, both ways.

    against_transformers.py PRINT_LOGITS FOLDER

Needs torch, transformers, peft, safetensors and jinja2. For a small random model of each kind it compares the logits of a model that
transformers wrote, of one that we wrote, of adapters that peft wrote, of those merged by us, and of adapters that we wrote. Prints the largest
differences; exits with 1 where one is above 1e-4.
"""

import subprocess
import sys

import numpy
import torch
import transformers
from safetensors.torch import load_file
from peft import LoraConfig, PeftModel, get_peft_model

LLAMA = dict(hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
             vocab_size=97, max_position_embeddings=64, initializer_range=0.2)
CONFIGS = {
    'llama': transformers.LlamaConfig(**LLAMA, head_dim=12, tie_word_embeddings=True),
    'llama-biases-llama3': transformers.LlamaConfig(
        **LLAMA, attention_bias=True, mlp_bias=True,
        rope_parameters=dict(rope_type='llama3', rope_theta=1000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                             original_max_position_embeddings=16)),
    'mistral': transformers.MistralConfig(**LLAMA, sliding_window=None),
    'qwen2': transformers.Qwen2Config(**LLAMA),
    'mixtral': transformers.MixtralConfig(**LLAMA, num_local_experts=8, num_experts_per_tok=2),
    'qwen2_moe': transformers.Qwen2MoeConfig(**LLAMA, num_experts=6, moe_intermediate_size=20, shared_expert_intermediate_size=40,
                                             mlp_only_layers=[1]),
    'qwen3_moe': transformers.Qwen3MoeConfig(**LLAMA, head_dim=12, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20,
                                             norm_topk_prob=True),
    'gpt2': transformers.GPT2Config(n_embd=48, n_layer=3, n_head=6, n_positions=64, vocab_size=97, initializer_range=0.2),
}
program, folder = sys.argv[1:]
tokens = [int(t) for t in numpy.random.default_rng(1).integers(0, 97, 40)]
worst = 0.0


def ours(*arguments):
    out = subprocess.run([program, *arguments, '--', *map(str, tokens)], capture_output=True)
    if out.returncode != 0:
        sys.exit(f'{arguments}: {out.stderr.decode()}')
    return numpy.frombuffer(out.stdout, dtype=numpy.float32).reshape(len(tokens), -1)


def theirs(model):
    with torch.no_grad():
        return model.eval()(torch.tensor([tokens])).logits[0].numpy()


def compare(what, left, right):
    global worst
    difference = float(numpy.abs(left - right).max())
    worst = max(worst, difference)
    print(f'{what}: {difference:.2e} of {float(numpy.abs(right).max()):.1f}')


for name, config in CONFIGS.items():
    torch.manual_seed(1)
    base = f'{folder}/{name}'
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.5, 0.2)
    model.save_pretrained(base, max_shard_size='40KB' if name == 'mistral' else '1GB')
    compare(f'{name}, read', ours(base), theirs(model))

    subprocess.run([program, base, '--export', f'{base}-out'], check=True)
    again = transformers.AutoModelForCausalLM.from_pretrained(f'{base}-out')
    compare(f'{name}, written', theirs(again), theirs(model))
    assert load_file(f'{base}-out/model.safetensors')

    layers = ['c_attn', 'c_fc'] if name == 'gpt2' else ['q_proj', 'v_proj']
    if name in ('llama', 'llama-biases-llama3', 'mistral', 'qwen2'):
        layers.append('down_proj')
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=10, target_modules=layers, task_type='CAUSAL_LM',
                                               fan_in_fan_out=name == 'gpt2'))
    for parameter_name, parameter in adapted.named_parameters():
        if 'lora_B' in parameter_name:
            torch.nn.init.normal_(parameter, 0, 0.1)
    adapted.save_pretrained(f'{base}-adapters')
    compare(f"{name}, peft's adapters", ours(base, f'{base}-adapters'), theirs(adapted))
    subprocess.run([program, base, f'{base}-adapters', '--export', f'{base}-merged'], check=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(f'{base}-merged')
    compare(f'{name}, merged', theirs(merged), theirs(adapted))
    subprocess.run([program, base, f'{base}-adapters', '--save-adapters', f'{base}-adapters-out'], check=True)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    compare(f'{name}, our adapters', theirs(PeftModel.from_pretrained(plain, f'{base}-adapters-out')), theirs(adapted))

sys.exit(worst > 1e-4)
