#!/usr/bin/env python3
"""scripts/pth_to_safetensors.py, on files as torch.save() writes them; torch itself is not needed."""

import collections
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import types
import unittest
import zipfile
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts/pth_to_safetensors.py"

# The names that such files mention.
torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
for kind in ("FloatStorage", "LongStorage", "HalfStorage", "QInt8Storage"):
    setattr(torch, kind, type(kind, (), {"__module__": "torch", "__qualname__": kind}))


def _rebuild_tensor_v2(*_):
    """Never called: only its name is written."""


_rebuild_tensor_v2.__module__, _rebuild_tensor_v2.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
utils._rebuild_tensor_v2 = _rebuild_tensor_v2
sys.modules.update({"torch": torch, "torch._utils": utils})


class Storage:
    def __init__(self, kind, key, data, numel):
        self.kind, self.key, self.data, self.numel = kind, key, data, numel


class Tensor:
    def __init__(self, storage, offset, sizes, strides):
        self.arguments = (storage, offset, sizes, strides, False, collections.OrderedDict())

    def __reduce__(self):
        return utils._rebuild_tensor_v2, self.arguments


class Pickler(pickle.Pickler):
    legacy = False

    def persistent_id(self, obj):
        if not isinstance(obj, Storage):
            return None
        identifier = ("storage", getattr(torch, obj.kind), obj.key, "cpu", obj.numel)
        return (*identifier, None) if self.legacy else identifier


def pickled(obj, legacy=False):
    out = io.BytesIO()
    pickler = Pickler(out, protocol=2)
    pickler.legacy = legacy
    pickler.dump(obj)
    return out.getvalue()


def zip_form(path, obj, storages, order=b"little"):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("weights/data.pkl", pickled(obj))
        archive.writestr("weights/byteorder", order)
        for storage in storages:
            archive.writestr(f"weights/data/{storage.key}", storage.data)


def legacy_form(path, obj, storages):
    with open(path, "wb") as out:
        for part in (0x1950a86a20f9469cfc6c, 1001, {"little_endian": True, "protocol_version": 1001, "type_sizes": {}}):
            out.write(pickle.dumps(part, protocol=2))
        out.write(pickled(obj, legacy=True) + pickle.dumps([storage.key for storage in storages], protocol=2))
        for storage in storages:
            out.write(struct.pack("<q", storage.numel) + storage.data)


class PthToSafetensors(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.source, self.target = self.folder / "weights.pth", self.folder / "weights.safetensors"
        self.floats = Storage("FloatStorage", "0", struct.pack("<6f", *range(6)), 6)
        self.longs = Storage("LongStorage", "1", struct.pack("<q", 7), 1)
        self.weights = collections.OrderedDict(
            whole=Tensor(self.floats, 0, (2, 3), (3, 1)), turned=Tensor(self.floats, 0, (3, 2), (1, 3)),
            end=Tensor(self.floats, 4, (2,), (1,)), count=Tensor(self.longs, 0, (), ()))

    def convert(self):
        return subprocess.run([sys.executable, SCRIPT, self.source, self.target], capture_output=True, text=True, check=False)

    def refused(self, words):
        done = self.convert()
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn(words, done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertFalse(self.target.exists())

    def read(self):
        data = self.target.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        self.assertEqual(length % 8, 0)
        header, body = json.loads(data[8:8 + length]), data[8 + length:]
        formats = {"F32": "f", "I64": "q"}
        values = {}
        for name, entry in header.items():
            found = struct.iter_unpack("<" + formats[entry["dtype"]], body[slice(*entry["data_offsets"])])
            values[name] = (entry["shape"], [value for (value,) in found])
        return values

    def test_both_forms_give_names_shapes_and_values_and_views_lie_row_by_row(self):
        for form in (zip_form, legacy_form):
            form(self.source, self.weights, [self.floats, self.longs])
            done = self.convert()
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(self.read(), {"whole": ([2, 3], [0, 1, 2, 3, 4, 5]), "turned": ([3, 2], [0, 3, 1, 4, 2, 5]),
                                           "end": ([2], [4, 5]), "count": ([], [7])})

    def test_weights_beside_other_things_and_behind_a_wrappers_prefix_are_found(self):
        weights = {"module.end": Tensor(self.floats, 4, (2,), (1,))}
        for key in ("state_dict", "model", "model_state_dict"):
            zip_form(self.source, {key: weights, "epoch": 3}, [self.floats])
            done = self.convert()
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(self.read(), {"end": ([2], [4, 5])})
        # A module of that name is none that a wrapper made.
        zip_form(self.source, {**weights, "head": Tensor(self.floats, 0, (1,), (1,))}, [self.floats])
        self.assertEqual(self.convert().returncode, 0)
        self.assertEqual(set(self.read()), {"module.end", "head"})

    def test_a_file_that_would_run_code_is_refused_before_it_does(self):
        class Harm:
            def __reduce__(self):
                return os.system, (f"touch {self.touched}",)

        Harm.touched = self.folder / "touched"
        zip_form(self.source, {"weight": Harm()}, [])
        self.refused("posix.system")
        self.assertFalse(Harm.touched.exists())

    def test_damage_and_other_files_are_told_in_a_line(self):
        legacy_form(self.source, self.weights, [self.floats, self.longs])
        self.source.write_bytes(self.source.read_bytes()[:-3])
        self.refused("cut off: expected 8 bytes, got 5")
        self.source.write_bytes(b"weights?")
        self.refused("it is no file of torch.save(), or it is damaged")
        zip_form(self.source, {"lr": 0.1}, [])
        self.refused("its entry 'lr' is no tensor")
        zip_form(self.source, {"weight": Tensor(self.floats, 2, (2, 3), (3, 1))}, [self.floats])
        self.refused("lies outside of its storage of 6 elements")
        zip_form(self.source, {"weight": Tensor(self.floats, 0, (10**12,), (0,))}, [self.floats])
        self.refused("repeats the 6 elements of its storage")
        zip_form(self.source, self.weights, [self.floats, self.longs], order=b"big")
        self.refused("big-endian")
        quantised = Storage("QInt8Storage", "0", b"1", 1)
        zip_form(self.source, {"weight": Tensor(quantised, 0, (1,), (1,))}, [quantised])
        self.refused("torch.QInt8Storage")


if __name__ == "__main__":
    unittest.main()
