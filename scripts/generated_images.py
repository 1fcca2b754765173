#!/usr/bin/env python3
"""Makes images from a seed, for a machine to which no data set was brought: each class has a mean colour, and noise over it.

    generated_images.py FOLDER

FOLDER/folders/CLASS/N.png is what examples/train_imagenet reads, FOLDER/idx what examples/train_resnet reads. A folder that is there is left
as it is.
"""

import gzip
import random
import struct
import sys
import zlib
from pathlib import Path

CLASSES = 10
PNG_SIDE, PNGS = 80, 32  # a class
IDX_SIDE, IDX_SAMPLES = 28, {"train": 1024, "t10k": 256}
SEED = 1


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(side, pixels):
    """pixels: side x side x 3 bytes."""
    rows = b"".join(b"\0" + pixels[row * 3 * side:(row + 1) * 3 * side] for row in range(side))
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 1)) +
            chunk(b"IEND", b""))


def noisy(means, draws, numel):
    """numel bytes around the means, which repeat."""
    noise = draws.randbytes(numel)
    return bytes((means[i % len(means)] + noise[i]) // 2 for i in range(numel))


def make_folders(folder, draws):
    for number in range(CLASSES):
        of_class = folder / f"class{number}"
        of_class.mkdir(parents=True)
        means = [draws.randrange(256) for _ in range(3)]
        for image in range(PNGS):
            (of_class / f"{image}.png").write_bytes(png(PNG_SIDE, noisy(means, draws, PNG_SIDE**2 * 3)))


def make_idx(folder, draws):
    folder.mkdir(parents=True)
    means = [draws.randrange(256) for _ in range(CLASSES)]
    for part, samples in IDX_SAMPLES.items():
        labels = [sample % CLASSES for sample in range(samples)]
        images = b"".join(noisy([means[label]], draws, IDX_SIDE**2) for label in labels)
        header = struct.pack(">IIII", 0x803, samples, IDX_SIDE, IDX_SIDE)
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images, 1))
        header = struct.pack(">II", 0x801, samples)
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header + bytes(labels), 1))


def main():
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder, draws = Path(sys.argv[1]), random.Random(SEED)
    if folder.exists():
        print(f"{folder} is there")
        return 0
    made = folder.with_name(folder.name + ".part")
    make_folders(made / "folders", draws)
    make_idx(made / "idx", draws)
    made.rename(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
