"""The files of this project: what git tracks, and what it would."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def files(*suffixes):
    """Their paths from the project's folder on, in order; those that end so."""
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
                            check=True).stdout.split()
    return sorted(name for name in set(listed) if name.endswith(suffixes) and (ROOT / name).exists())
