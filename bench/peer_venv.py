"""The interpreter of the peers: of the virtual environment `.venv-peers` in the root of the repository, or the one
that runs this."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from children import run_child

TORCH_VERSION = "2.11.0"
ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-peers"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "installed-requirements"  # one requirement a line, written after pip succeeded
FREE_BYTES_NEEDED = 8 * 10**9  # for torch, which comes first
FREE_BYTES_NEEDED_TO_ADD = 10**9
INSTALL_TIMEOUT_SECONDS = 3600


def ensure(requirements, environment):
    """Installs what is not there yet, with `environment` (name -> value) added to pip's own;
    returns the interpreter. SystemExit with a message where it cannot. Interrupted half-way, it
    goes on at the next call."""
    installed = STAMP.read_text().split() if STAMP.exists() and PYTHON.exists() else []
    missing = [r for r in requirements if r not in installed]
    if not missing:
        return PYTHON
    needed_bytes = FREE_BYTES_NEEDED_TO_ADD if installed else FREE_BYTES_NEEDED
    free_bytes = shutil.disk_usage(ROOT).free
    if free_bytes < needed_bytes:
        raise SystemExit(
            f"error: {VENV} needs {needed_bytes / 1e9:.0f} GB of free disk to install "
            f"{' '.join(missing)}, found {free_bytes / 1e9:.1f} GB; free some space and run again"
        )
    size = "" if installed else " (4.7 GB, minutes)"
    print(f"installing {' '.join(missing)} into {VENV}{size}", file=sys.stderr)
    _run([sys.executable, "-m", "venv", VENV])
    settings = [f"{name}={value}" for name, value in environment.items()]
    pip = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check"]
    # With those installed before, so that pip keeps their versions.
    _run(["env", *settings, *pip, *installed, *missing])
    partial = STAMP.with_suffix(".new")
    partial.write_text("\n".join(installed + missing) + "\n")
    os.replace(partial, STAMP)
    return PYTHON


def current(with_cuda):
    """The interpreter that runs this, which must have PyTorch 2.11.0, with a CUDA device if
    `with_cuda`. SystemExit with a message where it has not."""
    code = "import torch; print(torch.__version__.split('+')[0], torch.cuda.is_available())"
    # Asked in a process of its own: this one stays free of torch.
    asked = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    version, _, has_cuda = asked.stdout.strip().partition(" ")
    if version != TORCH_VERSION or (with_cuda and has_cuda != "True"):
        wanted = f"PyTorch {TORCH_VERSION}" + (" and a CUDA device" if with_cuda else "")
        found = f"PyTorch {version}, CUDA device: {has_cuda}" if version else "no PyTorch"
        raise SystemExit(
            f"error: {sys.executable} needs {wanted} to run the peers, found {found}; start this "
            "with another python3"
        )
    return sys.executable


def _run(command):
    status = run_child(command, sys.stderr, INSTALL_TIMEOUT_SECONDS)
    if status != 0:
        words = " ".join(map(str, command))
        raise SystemExit(f"error: exit status {status} from: {words}")
