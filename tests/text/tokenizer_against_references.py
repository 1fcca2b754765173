#!/usr/bin/env python3
"""Compares zeropage::text::Tokenizer with tiktoken and with Hugging Face's tokenizers, number by number.

  python3 -m venv /tmp/references
  /tmp/references/bin/pip install tokenizers==0.23.3 tiktoken==0.14.0 gguf
  for name in gpt2-bpe smollm2-135m austen chitchat; do scripts/get_data.sh $name; done
  cmake --build --preset release --target encode_texts
  /tmp/references/bin/python tests/text/tokenizer_against_references.py build/release/tests/encode_texts

Texts are six novels, 4,018 conversations, 10,000 random strings (--strings N, --seed N), and every character of Unicode between letters, digits,
spaces and marks. Random bytes must come back from their tokens.
Takes some 10 minutes. Speeds are of a core: bytes by seconds of the processor. Exit code 1 where anything differs.
"""

import argparse
import json
import random
import struct
import subprocess
import sys
import tempfile
import time
import unicodedata
from pathlib import Path

import tiktoken
import tokenizers
from gguf import GGUFReader
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
END = "<|endoftext|>"


class Ours:
    def __init__(self, program, path):
        self.program, self.path = program, path

    def encode(self, texts, mode):
        """The tokens of each, seconds, and how many did not come back from them."""
        packed = b"".join(struct.pack("<I", len(text)) + text for text in texts)
        ran = subprocess.run([self.program, self.path, mode], input=packed, capture_output=True)
        if ran.returncode:
            sys.exit(ran.stderr.decode())
        numbers, at, found = memoryview(ran.stdout).cast("i"), 0, []
        while at < len(numbers):
            found.append(list(numbers[at + 1:at + 1 + numbers[at]]))
            at += 1 + numbers[at]
        seconds, lost = ran.stderr.split()
        return found, float(seconds), int(lost)


def random_strings(count, seed):
    """Strings of what cuts and merges look at: letters, marks, digits and spaces of many scripts, contractions, special tokens."""
    random.seed(seed)
    spaces = [chr(c) for c in range(0x3001) if chr(c).isspace()] + ["\u180e", "\u200b", "\ufeff"]
    words = ["'s", "'S", "'ll", "'LL", "'re", "'\u017f", "don't", "I've", " the", "The", "ing", "\r\n", "\n\n", "  ", "\t", END, "<|im_start|>", "<|endoftext|",
             "<|<|endoftext|>", "1234567", "3.14159", "x" * 70, "ab" * 50, "=" * 80, " " * 90, "\u00e9", "e\u0301", "\uac00", "\u1100\u1161", "\u0958", "\U0001f468\u200d\U0001f469"]
    pools = [
        lambda: chr(random.randrange(0x20, 0x7f)),
        lambda: random.choice(words),
        lambda: random.choice(spaces),
        lambda: chr(random.randrange(0x80, 0x800)),
        lambda: chr(random.choice([random.randrange(0x800, 0xd800), random.randrange(0xe000, 0x10000)])),
        lambda: chr(random.randrange(0x10000, 0x110000)),
        lambda: chr(random.randrange(0x1f300, 0x1fa00)),
        lambda: random.choice("\u0663\u06f4\u0967\u00b2\u2167\u00bd\u4e00\u4e8c\u3007"),
        lambda: random.choice("etaoin shrdlu"),
    ]
    strings = []
    for _ in range(count):
        chosen = random.sample(pools, random.randrange(1, len(pools)))
        strings.append("".join(random.choice(chosen)() for _ in range(random.randrange(120))))
    return strings


def every_character():
    """Each that may be a letter or number, and some of those for private use and of planes that have none."""
    characters = [*range(0xd800), *range(0xe000, 0x35000), *range(0x35000, 0x110000, 97)]
    return [f"a{c}b {c}{c} 1{c}2 .{c}, \n{c}" for c in map(chr, characters) if not "\ue000" <= c <= "\uf7ff"]


def gpt2_like(vocabulary, merges, cut, normalizer=None, special=(END,), **model):
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **model))
    made.pre_tokenizer, made.decoder = cut, decoders.ByteLevel()
    if normalizer:
        made.normalizer = normalizer
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return made


def split(expression):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(expression), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def references(data, folder):
    """Name, our path, and what it is compared with."""
    files = {"vocab_bpe_file": str(data / "gpt2-bpe/vocab.bpe"), "encoder_json_file": str(data / "gpt2-bpe/encoder.json")}
    encoding = tiktoken.Encoding("gpt2", explicit_n_vocab=50257, pat_str=GPT2, mergeable_ranks=data_gym_to_mergeable_bpe_ranks(**files), special_tokens={END: 50256})
    yield "GPT-2's files, tiktoken", data / "gpt2-bpe", "recognised", lambda texts: [encoding.encode(text, allowed_special="all") for text in texts]
    yield "GPT-2's files, tiktoken's encode_ordinary", data / "gpt2-bpe", "as-text", lambda texts: [encoding.encode_ordinary(text) for text in texts]

    vocabulary = json.loads(Path(files["encoder_json_file"]).read_text())
    merges = [tuple(line.split(" ")) for line in Path(files["vocab_bpe_file"]).read_text().split("\n")[1:] if line]
    model = data / "smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"
    fields = GGUFReader(model).fields
    tokens, types = (fields["tokenizer.ggml." + key].contents() for key in ("tokens", "token_type"))
    small = {token: i for i, token in enumerate(tokens)}, [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"].contents()]
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    special = [token for token, kind in zip(tokens, types) if kind == 3]
    made = {
        "gpt2": gpt2_like(vocabulary, merges, pre_tokenizers.ByteLevel(add_prefix_space=False)),
        "smollm2": gpt2_like(*small, digits, special=special),
        "llama3": gpt2_like(vocabulary, merges, split(LLAMA3), ignore_merges=True),
        "qwen2": gpt2_like(vocabulary, merges, split(QWEN2), normalizers.NFC()),
    }
    for name, tokenizer in made.items():
        (folder / name).mkdir()
        path = folder / name / "tokenizer.json"
        tokenizer.save(str(path))
        paths = {f"tokenizer.json as {name}'s": path} | ({"SmolLM2's GGUF": model} if name == "smollm2" else {})
        for what, where in paths.items():
            yield what + ", tokenizers", where, "recognised", lambda texts, t=tokenizer: [found.ids for found in t.encode_batch(texts, add_special_tokens=False)]
        plain = tokenizers.Tokenizer.from_file(str(path))
        plain.encode_special_tokens = True
        yield f"tokenizer.json as {name}'s, encode_special_tokens", path, "as-text", lambda texts, t=plain: [found.ids for found in t.encode_batch(texts, add_special_tokens=False)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--data", type=Path, default=Path("datasets"))
    parser.add_argument("--strings", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    texts = {
        "novels": [path.read_text() for path in sorted((args.data / "austen").glob("*.txt"))],
        "conversations": (args.data / "chitchat/chitchat.jsonl").read_text().splitlines(keepends=True),
        "random strings": random_strings(args.strings, args.seed),
        "every character": every_character(),
    }
    print(f"tiktoken {tiktoken.__version__}, tokenizers {tokenizers.__version__}, Python's Unicode {unicodedata.unidata_version}")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, path, mode, encode in references(args.data, Path(folder)):
            ours = Ours(args.program, path)
            for what, strings in texts.items():
                if "qwen2" in name:
                    # The reference composes by an older Unicode, in which U+07FD and others have no order.
                    strings = [text for text in strings if normalizers.NFC().normalize_str(text) == unicodedata.normalize("NFC", text)]
                packed = [text.encode() for text in strings]
                found, seconds, _ = ours.encode(packed, mode)
                begin = time.process_time()
                expected = encode(strings)
                theirs = time.process_time() - begin
                unequal = [text for text, a, b in zip(strings, found, expected) if a != b]
                size = sum(map(len, packed)) / 1e6
                print(f"{name}: {what}, {len(strings)} of {size:.1f} MB, {sum(map(len, found))} tokens: {len(unequal)} differ; {size / seconds:.1f} MB/s a core, "
                      f"theirs {size / theirs:.1f}")
                for text in unequal[:100 if what == "every character" else 3]:
                    if what == "every character":
                        print(f"   U+{ord(text[1]):04X} {unicodedata.category(text[1])}", end="")
                    else:
                        print("   ", ascii(text)[:300])
                print("" if not unequal else "\n", end="")
                failed += len(unequal)
    random.seed(args.seed)
    blobs = [random.randbytes(random.randrange(300)) for _ in range(args.strings)]
    _, _, lost = Ours(args.program, args.data / "gpt2-bpe").encode(blobs, "as-text")
    print(f"random bytes: {lost} of {len(blobs)} do not come back")
    sys.exit(1 if failed or lost else 0)


if __name__ == "__main__":
    main()
