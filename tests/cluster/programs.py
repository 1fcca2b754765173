"""The programs that the tests of this folder start: train_resnet, and the launchers that this machine has."""

import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = ROOT / "examples" / "cluster"
IMAGE_SIDE = 28

# Ranks of Open MPI that root starts, more of them than cores.
_OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}


def environment(**more):
    """Ours, without what a launcher around this test may have set."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in names and not name.startswith(("SLURM", "OMPI", "PMIX"))}
    return {**kept, **_OPEN_MPI, **more}


def build_folder():
    return Path(os.environ.get("ZEROPAGE_BUILD", ROOT / "build" / "release"))


def train_resnet(*flags):
    return [str(word) for word in (build_folder() / "examples" / "train_resnet", *flags)]


def zp_run(ranks, command):
    return [str(build_folder() / "tools" / "zp"), "run", "-n", str(ranks), "--", *command]


def find_torchrun():
    """(a torchrun that starts, "") or (None, why there is none). PyPI's torch brings one, which needs Python packages of its own."""
    tried = []
    for path in (ROOT / ".venv-peers" / "bin" / "torchrun", ROOT / ".venv" / "bin" / "torchrun", shutil.which("torchrun")):
        if path is None or not Path(path).exists():
            continue
        # Its first line may name the Python of a folder that was moved since.
        command = [str(Path(path).with_name("python")), "-m", "torch.distributed.run"]
        done = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False, timeout=120)
        if done.returncode == 0:
            return command, ""
        tried.append(f"{path}: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'ends at once'}")
    return None, "no torchrun starts here: " + ("; ".join(tried) or "there is none in .venv-peers, .venv or on PATH")


def why_no_mpirun():
    return "" if shutil.which("mpirun") else "there is no mpirun; scripts/setup.sh --cluster installs Open MPI"


def write_images(folder, training=50, test=7):
    """Images of noise, as Fashion-MNIST names them."""
    folder.mkdir(parents=True, exist_ok=True)
    noise = 1
    for part, count in (("train", training), ("t10k", test)):
        pixels = bytearray()
        for _ in range(count * IMAGE_SIDE * IMAGE_SIDE):
            noise = (noise * 1664525 + 1013904223) % 2**32
            pixels.append(noise >> 24)
        sizes = b"".join(size.to_bytes(4, "big") for size in (count, IMAGE_SIDE, IMAGE_SIDE))
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(b"\0\0\x08\x03" + sizes + pixels)
        labels = bytes(number % 10 for number in range(count))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(b"\0\0\x08\x01" + count.to_bytes(4, "big") + labels)


def weights_in(output):
    """The weights_sha256 that train_resnet printed."""
    found = re.findall(r"weights_sha256 ([0-9a-f]{64})", output)
    if len(found) != 1:
        raise AssertionError(f"expected one weights_sha256, got {len(found)} in:\n{output[-4000:]}")
    return found[0]


def run(command, env=None, timeout=120):
    """stdout and stderr of a command that succeeds."""
    done = subprocess.run([str(word) for word in command], env=env or environment(), stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False)
    if done.returncode != 0:
        raise AssertionError(f"exit code {done.returncode} of {' '.join(map(str, command))}:\n{done.stdout[-4000:]}")
    return done.stdout
