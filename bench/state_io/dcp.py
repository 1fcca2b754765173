"""Seconds that torch.distributed.checkpoint takes to save fp32 tensors in one process, until they are on the disk: dcp.py FOLDER MEBIBYTES."""

import shutil
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

warnings.filterwarnings("ignore")
folder, mebibytes = Path(sys.argv[1]), int(sys.argv[2])
state = {f"layer{i}.{name}": torch.randn(1024, 1024) for i in range(max(1, mebibytes // 4)) for name in ("weight", "exp_avg", "exp_avg_sq")}
shutil.rmtree(folder, ignore_errors=True)
start = time.perf_counter()
dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, sync_files=True), no_dist=True)
print(time.perf_counter() - start)
