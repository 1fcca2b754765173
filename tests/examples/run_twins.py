#!/usr/bin/env python3
"""Runs the files of a folder that it is given, one after the other in this process, each behind a line "== NAME".

The wheel of torch is linked with CUDA's libraries. Their stand-ins have no functions, so what needs one is bound when it is called.
"""

import os
import runpy
import sys
import warnings
from pathlib import Path

sys.setdlopenflags(os.RTLD_LAZY)
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch

torch.set_num_threads(1)
for twin in sorted(Path(sys.argv[1]).glob("*.py")):
    print("==", twin.stem, flush=True)
    runpy.run_path(str(twin), run_name="__main__")
