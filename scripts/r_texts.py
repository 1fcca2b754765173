#!/usr/bin/env python3
"""Writes the texts of an R package's lazy-load database as files: NAME.txt of each vector of strings, a line an element.

  scripts/r_texts.py DATABASE.rdx FOLDER     DATABASE.rdb lies beside it

Reads what such databases of texts have: vectors, strings, pairs and their attributes, in R's binary form ("XDR", versions 2 and 3 of it). Anything
else is refused with its type. Needs no R.
"""

import bz2
import gzip
import lzma
import struct
import sys
import zlib
from pathlib import Path

HAS_ATTRIBUTES, HAS_TAG = 0x200, 0x400
NOTHING, REFERENCE, SYMBOL, PAIRS, CHARACTERS, LOGICALS, INTEGERS, REALS, STRINGS, VECTOR = 254, 255, 1, 2, 9, 10, 13, 14, 16, 19


class Serialized:
    """A value in R's binary form. value() gives str, None, a list (of a vector with names: a dict), or for pairs a dict."""

    def __init__(self, data):
        self.data, self.at, self.symbols = data, 0, []
        if self.take(2) != b"X\n":
            raise ValueError("expected R's binary form, which begins with X")
        version = self.integer()
        self.take(8)  # R's own versions
        if version == 3:
            self.take(self.integer())  # the encoding's name
        elif version != 2:
            raise ValueError(f"expected version 2 or 3 of R's binary form, got {version}")

    def take(self, count):
        if count < 0 or self.at + count > len(self.data):
            raise ValueError(f"expected {count} bytes at byte {self.at}, got {len(self.data) - self.at}")
        self.at += count
        return self.data[self.at - count:self.at]

    def integer(self):
        return struct.unpack(">i", self.take(4))[0]

    def value(self):
        flags = self.integer()
        kind = flags & 0xFF
        if kind == NOTHING:
            return None
        if kind == REFERENCE:
            return self.symbols[(flags >> 8) - 1]
        if kind == SYMBOL:
            self.symbols.append(self.value())
            return self.symbols[-1]
        if kind == PAIRS:
            if flags & HAS_ATTRIBUTES:
                self.value()
            tag = self.value() if flags & HAS_TAG else None
            return {tag: self.value(), **(self.value() or {})}
        count = self.integer()
        if kind == CHARACTERS:
            return None if count == -1 else self.take(count).decode()
        if kind in (LOGICALS, INTEGERS):
            found = list(struct.unpack(f">{count}i", self.take(4 * count)))
        elif kind == REALS:
            found = list(struct.unpack(f">{count}d", self.take(8 * count)))
        elif kind in (STRINGS, VECTOR):
            found = [self.value() for _ in range(count)]
        else:
            raise ValueError(f"R's type {kind} at byte {self.at} is not read here")
        attributes = self.value() if flags & HAS_ATTRIBUTES else None
        return dict(zip(attributes["names"], found)) if attributes and "names" in attributes else found


def unpacked(entry):
    """An entry of a database: its size, the letter of its compression (zlib has none), and the bytes."""
    size, rest = struct.unpack(">I", entry[:4])[0], entry[4:]
    letter = rest[:1]
    if letter == b"2":
        data = bz2.decompress(rest[1:])
    elif letter == b"Z":
        # R's raw LZMA2, with the filter of its default.
        data = lzma.decompress(rest[1:], lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 6}])
    elif letter == b"0":
        data = rest[1:]
    else:
        data = zlib.decompress(rest)
    if len(data) != size:
        raise ValueError(f"expected an entry of {size} bytes, got {len(data)}")
    return data


def main():
    index, folder = Path(sys.argv[1]), Path(sys.argv[2])
    packed = index.read_bytes()
    places = Serialized(gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else zlib.decompress(packed)).value()["variables"]
    database = index.with_suffix(".rdb").read_bytes()
    for name, (begin, size) in places.items():
        lines = Serialized(unpacked(database[begin:begin + size])).value()
        if isinstance(lines, list) and all(isinstance(line, str) for line in lines):
            (folder / f"{name}.txt").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
            print(f"{name}.txt: {len(lines)} lines")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: r_texts.py DATABASE.rdx FOLDER")
    try:
        main()
    except (OSError, ValueError, KeyError, IndexError, struct.error, zlib.error, lzma.LZMAError) as error:
        sys.exit(f"r_texts: {sys.argv[1]}: {error}")
