#!/usr/bin/env python3
"""Converts a dictionary of tensors that PyTorch has saved (torch.save(model.state_dict(), file)) to safetensors, without torch.

    scripts/pth_to_safetensors.py weights.pth weights.safetensors

It reads both forms: the zip archive of PyTorch 1.6 and later, and the row of pickles before it. A pickle may name any function of Python and
have it called. So only what a dictionary of tensors is made of is let through, and a file that names anything else is refused.

Exit status: 0; 1 where the file is none of these or is damaged, with a line on stderr; 2 for a wrong command line.
"""

import argparse
import collections
import json
import math
import os
import pickle
import struct
import sys
import zipfile
from pathlib import Path

# PyTorch's storage classes: the name of safetensors, bytes an element.
STORAGES = {"DoubleStorage": ("F64", 8), "FloatStorage": ("F32", 4), "HalfStorage": ("F16", 2), "BFloat16Storage": ("BF16", 2),
            "LongStorage": ("I64", 8), "IntStorage": ("I32", 4), "ShortStorage": ("I16", 2), "CharStorage": ("I8", 1),
            "ByteStorage": ("U8", 1), "BoolStorage": ("BOOL", 1)}
LEGACY_MAGIC = 0x1950a86a20f9469cfc6c
LEGACY_VERSION = 1001
# Under which scripts save weights beside other things; the first that a file has is taken.
WEIGHTS_KEYS = ("state_dict", "model", "model_state_dict")
WRAPPERS_PREFIX = "module."


class Refused(Exception):
    """What is wrong with the file, in a sentence."""


class Storage:
    """A flat piece of memory; its bytes come once the pickle is read."""

    def __init__(self, kind, key, numel):
        if kind not in STORAGES:
            raise Refused(f"it has a {kind}, expected one of {', '.join(STORAGES)}")
        self.dtype, self.item_bytes = STORAGES[kind]
        self.key, self.numel, self.data = key, numel, None


class Tensor:
    """A view of a storage."""

    def __init__(self, storage, offset, sizes, strides):
        self.storage, self.offset, self.sizes, self.strides = storage, offset, tuple(sizes), tuple(strides)
        last = offset + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides))
        if len(self.sizes) != len(self.strides) or min((offset, *self.sizes, *self.strides)) < 0 or (self.numel > 0 and last >= storage.numel):
            raise Refused(f"a tensor {self.sizes} with strides {self.strides} lies outside of its storage of {storage.numel} elements")
        if self.numel > storage.numel:
            raise Refused(f"a tensor {self.sizes} repeats the {storage.numel} elements of its storage; save a contiguous copy of it")

    @property
    def numel(self):
        return math.prod(self.sizes)

    def bytes(self):
        """Its elements, row by row."""
        item = self.storage.item_bytes
        contiguous, stride = True, 1
        for size, given in reversed(list(zip(self.sizes, self.strides))):
            contiguous, stride = contiguous and (size == 1 or given == stride), stride * size
        if contiguous or self.numel == 0:
            return self.storage.data[self.offset * item:(self.offset + self.numel) * item]
        places = [self.offset]
        for size, stride in zip(self.sizes, self.strides):
            places = [place + i * stride for place in places for i in range(size)]
        return b"".join(self.storage.data[place * item:(place + 1) * item] for place in places)


def rebuild_tensor(storage, offset, sizes, strides, *_):
    if not isinstance(storage, Storage):
        raise Refused("a tensor has no storage")
    return Tensor(storage, offset, sizes, strides)


class StorageKind(str):
    """The name of a class of PyTorch's; it is never called."""


class TensorsOnly(pickle.Unpickler):
    """An unpickler that knows what a dictionary of tensors is made of, and refuses the rest."""

    ALLOWED = {("collections", "OrderedDict"): collections.OrderedDict,
               ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor,
               ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor}

    def __init__(self, file):
        super().__init__(file, encoding="utf-8")
        self.storages = {}

    def find_class(self, module, name):
        if module == "torch" and name in STORAGES:
            return StorageKind(name)
        if (module, name) in self.ALLOWED:
            return self.ALLOWED[module, name]
        raise Refused(f"its pickle wants {module}.{name}, and a dictionary of tensors needs no such thing; it may be a whole module, or harmful")

    def persistent_load(self, identifier):
        if not isinstance(identifier, tuple) or len(identifier) < 5 or identifier[0] != "storage":
            raise Refused(f"its pickle names {identifier!r}, expected a storage")
        _, kind, key, _, numel = identifier[:5]
        if len(identifier) > 5 and identifier[5] is not None:
            raise Refused("it has views of storages, which PyTorch 0.1 wrote; load and save it with a newer one")
        return self.storages.setdefault(key, Storage(kind, key, numel))


def read_zip(path):
    with zipfile.ZipFile(path) as archive:
        members = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(members) != 1:
            raise Refused("it is a zip archive without one data.pkl; expected a file of torch.save()")
        root = members[0][:-len("data.pkl")]
        if root + "byteorder" in archive.namelist() and archive.read(root + "byteorder") != b"little":
            raise Refused("its numbers are big-endian")
        with archive.open(members[0]) as file:
            reader = TensorsOnly(file)
            saved = reader.load()
        for storage in reader.storages.values():
            storage.data = archive.read(f"{root}data/{storage.key}")
    return saved, reader.storages


def read_legacy(path):
    with open(path, "rb") as file:
        if TensorsOnly(file).load() != LEGACY_MAGIC or TensorsOnly(file).load() != LEGACY_VERSION:
            raise Refused("it is no file of torch.save()")
        if not TensorsOnly(file).load().get("little_endian", False):
            raise Refused("its numbers are big-endian")
        reader = TensorsOnly(file)
        saved = reader.load()
        for key in TensorsOnly(file).load():
            if key not in reader.storages:
                raise Refused(f"it has a storage {key!r} that no tensor names")
            storage = reader.storages[key]
            (numel,) = struct.unpack("<q", file.read(8))
            if numel != storage.numel:
                raise Refused(f"storage {key!r} has {numel} elements, its tensors say {storage.numel}")
            storage.data = file.read(numel * storage.item_bytes)
    return saved, reader.storages


def tensors_of(path):
    """Names and tensors of a file, in its order."""
    try:
        saved, storages = (read_zip if zipfile.is_zipfile(path) else read_legacy)(path)
    except (pickle.UnpicklingError, EOFError, struct.error, zipfile.BadZipFile, KeyError, AttributeError, ValueError, TypeError,
            IndexError, OverflowError, MemoryError) as error:
        raise Refused(f"it is no file of torch.save(), or it is damaged ({type(error).__name__}: {error})") from error
    for storage in storages.values():
        if storage.data is None or len(storage.data) != storage.numel * storage.item_bytes:
            raise Refused(f"storage {storage.key!r} is cut off: expected {storage.numel * storage.item_bytes} bytes, "
                          f"got {len(storage.data or b'')}")
    within = [key for key in WEIGHTS_KEYS if isinstance(saved, dict) and isinstance(saved.get(key), dict)]
    if within:
        saved = saved[within[0]]
    if not isinstance(saved, dict) or not saved:
        raise Refused("it has no dictionary of tensors")
    for name, tensor in saved.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise Refused(f"its entry {name!r} is no tensor; save model.state_dict() alone")
    # torch.nn.DataParallel and DistributedDataParallel put it in front of every name.
    if all(name.startswith(WRAPPERS_PREFIX) for name in saved):
        saved = {name.removeprefix(WRAPPERS_PREFIX): tensor for name, tensor in saved.items()}
    return saved


def write_safetensors(path, tensors):
    header, at = {}, 0
    for name, tensor in tensors.items():
        size = tensor.numel * tensor.storage.item_bytes
        header[name] = {"dtype": tensor.storage.dtype, "shape": list(tensor.sizes), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_name(path.name + ".unfinished")
    with open(unfinished, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            out.write(tensor.bytes())
    os.replace(unfinished, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("safetensors", type=Path)
    arguments = parser.parse_args()
    try:
        tensors = tensors_of(arguments.weights)
        write_safetensors(arguments.safetensors, tensors)
    except (Refused, OSError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {arguments.weights}: {error}")
    print(f"{arguments.safetensors}: {len(tensors)} tensors, {sum(tensor.numel for tensor in tensors.values())} numbers")


if __name__ == "__main__":
    main()
