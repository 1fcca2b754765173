#!/usr/bin/env python3
"""Writes tests/examples/language_model/expert_goldens.h: what Hugging Face's transformers compute for small models with experts.

    make_expert_goldens.py > expert_goldens.h

Needs torch, transformers and safetensors. Weights are a formula of each tensor's name, which tests compute too.
"""

import json
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

SHAPE = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=29,
             max_position_embeddings=32, router_aux_loss_coef=0.5)
QWEN = dict(**SHAPE, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=8)
CONFIGS = {
    'mixtral': transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, rms_norm_eps=1e-5),
    'qwen2_moe': transformers.Qwen2MoeConfig(**QWEN, shared_expert_intermediate_size=12, norm_topk_prob=False, mlp_only_layers=[1]),
    'qwen3_moe': transformers.Qwen3MoeConfig(**QWEN, head_dim=8, norm_topk_prob=True, decoder_sparse_step=2),
}
TOKENS = [[(7 * i * i + 3 * i + 11 * row) % 29 for i in range(12)] for row in range(2)]


def values(name, sizes):
    seed = sum((i + 1) * byte for i, byte in enumerate(name.encode())) % 7919
    numel = 1
    for size in sizes:
        numel *= size
    i = torch.arange(numel, dtype=torch.int64)
    drawn = ((i * 7919 + i * i * 31 + seed * 104729) % 2003).to(torch.float64) / 2003 - 0.5
    shift = 1.0 if name.endswith('norm.weight') else 0.0
    return (drawn * (1.6 if '.gate.' in name else 0.8) + shift).to(torch.float32).reshape(sizes)


goldens = {'transformers': transformers.__version__, 'torch': torch.__version__, 'tokens': TOKENS, 'models': {}}
for kind, config in CONFIGS.items():
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        sizes = {name: list(tensor.shape) for name, tensor in load_file(f'{folder}/model.safetensors').items()}
        save_file({name: values(name, of) for name, of in sizes.items()}, f'{folder}/model.safetensors', {'format': 'pt'})
        with open(f'{folder}/config.json') as file:
            written = json.load(file)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor(TOKENS)
    # Targets are what follows a token; transformers shifts labels itself.
    outputs = model.eval()(tokens, labels=tokens, output_router_logits=True)
    outputs.loss.backward()
    gradients = {name: float(parameter.grad.norm()) for name, parameter in model.named_parameters()
                 if name.endswith(('.gate.weight', 'embed_tokens.weight', '.down_proj'))}
    goldens['models'][kind] = {
        'config': written, 'sizes': sizes,
        'logits': [round(float(x), 6) for x in outputs.logits[:, -1].flatten()],
        'loss': float(outputs.loss - config.router_aux_loss_coef * outputs.aux_loss),
        'trained_loss': float(outputs.loss),
        'gradient_norms': gradients}

print('''// What transformers computes for small models with experts. Written by make_expert_goldens.py; do not edit.
#pragma once

namespace zeropage::testing {

// In pieces, as a string literal may have no more than 64 KiB.
inline constexpr const char* kExpertGoldens[] = {''')
text = json.dumps(goldens, separators=(',', ':'))
for begin in range(0, len(text), 110):
    print(f'    R"~({text[begin:begin + 110]})~",')
print('''};

}  // namespace zeropage::testing''')
