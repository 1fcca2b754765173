#!/usr/bin/env python3
"""Checks that others can read a saved state: its files through Hugging Face's safetensors, and through a parser of this
file's own, against each other and against manifest.json. Exit 1 with who, expected, got; 2: the command line.

    tools/check_safetensors.py run/step-20                    with safetensors.torch.load_file
    tools/check_safetensors.py run/step-20 --round-trip       saved once more by safetensors too, and compared
    tools/check_safetensors.py run/step-20 --without-torch    with safetensors alone, which hands out bytes

Needs: safetensors (.venv has it). Uses torch where it and numpy can be imported, else a line says so. Memory: the largest file, twice.
"""

import argparse
import ctypes
import json
import math
import mmap
import struct
import sys
import tempfile
import time
import warnings
from pathlib import Path

BLOCK_BYTES = 1 << 20
# Bytes an element, and what torch and safetensors' own writer call it.
DTYPES = {"BOOL": (1, "bool"), "U8": (1, "uint8"), "I8": (1, "int8"), "I16": (2, "int16"), "U16": (2, "uint16"),
          "F16": (2, "float16"), "BF16": (2, "bfloat16"), "I32": (4, "int32"), "U32": (4, "uint32"), "F32": (4, "float32"),
          "I64": (8, "int64"), "U64": (8, "uint64"), "F64": (8, "float64")}


class Wrong(Exception):
    def __init__(self, who, expected, got):
        super().__init__(f"{who}: expected {expected}, got {got}")


def expect(who, expected, got):
    if expected != got:
        raise Wrong(who, expected, got)


def crc_table():
    """The checksum's change by each two bytes, so that a step of Python takes two."""
    table = []
    for value in range(1 << 16):
        for _ in range(16):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


CRC_TABLE = crc_table()


def crc32c(data):
    crc = 0xFFFFFFFF
    even = len(data) & ~1
    for pair in memoryview(data)[:even].cast("H"):
        crc = CRC_TABLE[(crc ^ pair) & 0xFFFF] ^ crc >> 16
    for byte in data[even:]:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def each_once(pairs):
    names = dict(pairs)
    if len(names) != len(pairs):
        raise Wrong("header", "each name once", "one twice")
    return names


class PlainFile:
    """A safetensors file as the format's description has it."""

    def __init__(self, path):
        self.path = path
        self.name = path.name
        with path.open("rb") as file:
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        (length,) = struct.unpack("<Q", self.bytes[:8])
        self.begin = 8 + length
        header = json.loads(self.bytes[8:self.begin].decode(), object_pairs_hook=each_once)
        self.metadata = header.pop("__metadata__", {})
        self.tensors = header
        end = 0
        for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            expect(f"{self.name}: {name}: begin", end, tensor["data_offsets"][0])
            end += DTYPES[tensor["dtype"]][0] * math.prod(tensor["shape"])
            expect(f"{self.name}: {name}: end", end, tensor["data_offsets"][1])
        expect(f"{self.name}: size", self.begin + end, len(self.bytes))

    def data(self, name):
        begin, end = self.tensors[name]["data_offsets"]
        return self.bytes[self.begin + begin:self.begin + end]


class TorchReader:
    """safetensors.torch."""

    def __init__(self):
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        import safetensors
        import safetensors.torch
        import torch
        self.words = f"safetensors {safetensors.__version__} and torch {torch.__version__}"
        self.library = safetensors.torch
        self.codes = {getattr(torch, name): code for code, (_, name) in DTYPES.items() if hasattr(torch, name)}

    def load(self, path):
        """Dtype, shape and bytes by name."""
        self.loaded = self.library.load_file(path)
        return {name: (self.codes[tensor.dtype], list(tensor.shape),
                       ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()) if tensor.numel() else b"")
                for name, tensor in self.loaded.items()}

    def save(self, path, metadata):
        self.library.save_file(self.loaded, path, metadata=metadata)


class BytesReader:
    """safetensors without a framework."""

    def __init__(self):
        import safetensors
        self.words = f"safetensors {safetensors.__version__}, without torch"
        self.library = safetensors

    def load(self, path):
        self.loaded = {name: (tensor["dtype"], list(tensor["shape"]), bytes(tensor["data"]))
                       for name, tensor in self.library.deserialize(path.read_bytes())}
        return self.loaded

    def save(self, path, metadata):
        buffers = {name: ctypes.create_string_buffer(data, max(1, len(data))) for name, (_, _, data) in self.loaded.items()}
        specs = {name: self.library.TensorSpec(dtype=DTYPES[dtype][1], shape=shape, data_len=len(data),
                                               data_ptr=ctypes.addressof(buffers[name]))
                 for name, (dtype, shape, data) in self.loaded.items()}
        path.write_bytes(self.library.serialize(specs, metadata or None))


def read_manifest(path):
    text = path.read_bytes()
    tail = text.rfind(b',\n "crc32c_of_the_above": "')
    if tail < 0:
        raise Wrong(path.name, "a last line with a checksum", "none")
    manifest = json.loads(text)
    expect(f"{path.name}: checksum", f"{crc32c(text[:tail]):08x}", manifest["crc32c_of_the_above"])
    return manifest


def check_blocks(file, entry):
    """Returns the seconds that it took."""
    begin = time.monotonic()
    expect(f"{file.name}: size", entry["bytes"], len(file.bytes))
    expect(f"{file.name}: block_bytes", BLOCK_BYTES, entry["block_bytes"])
    digits = entry["crc32c"]
    expect(f"{file.name}: digits of checksums", 8 * math.ceil(entry["bytes"] / BLOCK_BYTES), len(digits))
    for block in range(len(digits) // 8):
        data = file.bytes[block * BLOCK_BYTES:(block + 1) * BLOCK_BYTES]
        expect(f"{file.name}: block {block}: CRC-32C", digits[8 * block:8 * block + 8], f"{crc32c(data):08x}")
    return time.monotonic() - begin


def check_tensors(who, plain, loaded):
    expect(f"{who}: names", sorted(plain.tensors), sorted(loaded))
    for name, tensor in plain.tensors.items():
        dtype, shape, data = loaded[name]
        expect(f"{who}: {name}: dtype", tensor["dtype"], dtype)
        expect(f"{who}: {name}: shape", tensor["shape"], shape)
        if data != plain.data(name):
            at = next(i for i, (a, b) in enumerate(zip(data, plain.data(name))) if a != b)
            raise Wrong(f"{who}: {name}", "the file's bits", f"others from its byte {at} on")


def check_tied(weights):
    """Returns how many names are tied, as safetensors.torch.load_model resolves them."""
    tied = {name: stored for name, stored in weights.metadata.items() if name != "format"}
    for name, stored in tied.items():
        if stored not in weights.tensors or name in weights.tensors:
            raise Wrong(f"{weights.name}: tied {name}", "another tensor of the file, under its name alone", stored)
    expect(f"{weights.name}: format", "pt", weights.metadata.get("format"))
    return len(tied)


def check_optimizer(weights, optimizer, groups):
    """Returns for how many parameters there are states."""
    states = {}
    for key, tensor in optimizer.tensors.items():
        parameter, _, state = key.rpartition(":")
        states.setdefault(parameter, {})[state] = tensor
    grouped = {name for group in groups for name in group["parameters"]}
    for parameter in states:
        if parameter not in grouped:
            raise Wrong(f"{optimizer.name}: {parameter}", "a parameter of the manifest's groups", "none of that name")
    for number, group in enumerate(groups):
        kinds = None
        for parameter in group["parameters"]:
            who = f"{optimizer.name}: {parameter}"
            weight = weights.tensors.get(weights.metadata.get(parameter, parameter))
            if weight is None:
                raise Wrong(f"manifest.json: group {number}", "parameters of the weights", parameter)
            of_it = states.get(parameter)
            if of_it is None:  # Never updated.
                continue
            # A master only stands beside weights of fewer bits.
            kinds = kinds or of_it.keys() - {"master"}
            expect(f"{who}: states", sorted(kinds), sorted(of_it.keys() - {"master"}))
            for state, tensor in of_it.items():
                shape = [] if state == "step" else weight["shape"]
                expect(f"{who}: shape of {state}", shape, tensor["shape"])
            if "step" in of_it:
                expect(f"{who}: dtype of step", "I64", of_it["step"]["dtype"])
            if "master" in of_it:
                expect(f"{who}: dtype of master", "F32", of_it["master"]["dtype"])
    return len(states)


def check_round_trip(plain, reader):
    """What safetensors writes of what it read; reader.load was called for it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / plain.name
        reader.save(path, plain.metadata)
        again = PlainFile(path)
        expect(f"{plain.name}: metadata after a round trip", plain.metadata, again.metadata)
        check_tensors(f"{plain.name}, after a round trip", plain,
                      {name: (tensor["dtype"], tensor["shape"], again.data(name)) for name, tensor in again.tensors.items()})


def check(directory, reader, round_trip):
    manifest = read_manifest(directory / "manifest.json")
    print(f"{directory}: step {manifest['step']}, read by {reader.words}")
    files = {}
    for name, entry in sorted(manifest["files"].items(), reverse=True):
        plain = files[name] = PlainFile(directory / name)
        seconds = check_blocks(plain, entry)
        check_tensors(name, plain, reader.load(directory / name))
        if round_trip:
            check_round_trip(plain, reader)
        print(f"{name:<22} {len(plain.tensors):>6} tensors {len(plain.bytes):>14} bytes, checksums at "
              f"{len(plain.bytes) / max(seconds, 1e-9) / 1e6:.0f} MB/s{', round trip' if round_trip else ''}")
    weights = files["weights.safetensors"]
    print(f"{'tied names':<22} {check_tied(weights):>6}")
    if "optimizer.safetensors" in files:
        groups = manifest["content"]["optimizer"]["groups"]
        found = check_optimizer(weights, files["optimizer.safetensors"], groups)
        print(f"{'parameters with state':<22} {found:>6} of {sum(len(group['parameters']) for group in groups)}")
    print("as others read it: names, shapes, dtypes, bits and checksums are right")


def reader(without_torch):
    """With torch where it can be imported, and saved from; else a line says so."""
    if not without_torch:
        try:
            import numpy  # noqa: F401, safetensors.torch saves with it

            return TorchReader()
        except ImportError as error:
            print(f"without torch ({error}): bits are compared as safetensors hands them out")
    return BytesReader()


def main():
    parser = argparse.ArgumentParser(description="Checks that Hugging Face's safetensors reads a saved state as it is.")
    parser.add_argument("DIR", type=Path, help="a state: a folder with manifest.json")
    parser.add_argument("--round-trip", action="store_true", help="save what was read once more and compare the bits")
    parser.add_argument("--without-torch", action="store_true", help="read bytes with safetensors alone")
    arguments = parser.parse_args()
    try:
        check(arguments.DIR, reader(arguments.without_torch), arguments.round_trip)
    except ImportError as error:
        sys.exit(f"check_safetensors: {error}; pip install safetensors, or call .venv/bin/python {sys.argv[0]}")
    except (Wrong, OSError, KeyError, TypeError, ValueError) as error:
        words = str(error) if isinstance(error, (Wrong, OSError)) else f"{arguments.DIR}: expected a state, got {error!r}"
        sys.exit(f"check_safetensors: {words}")


if __name__ == "__main__":
    main()
