"""A run on several ranks that succeeded ends with status 0."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# After training, the last collective of rank 0 ends late, and its tensor takes long to be released by the thread of the
# backend. The interpreter also takes long to shut down, so that the thread asks for its lock at that time: the order of
# events that happens by chance in a loaded machine.
SCRIPT = """
import sys, threading, time
import torch
from lightning_hmm import StandardHMM, fit

class Slow:
    def __del__(self):
        print("released by the main thread:", threading.current_thread() is threading.main_thread(), flush=True)
        time.sleep(2)

class Last:
    def __del__(self, sleep=time.sleep):
        sleep(4)

fit(StandardHMM(2, 3), [[0, 1, 2], [2, 1, 0]], 1, strategy="ddp", devices=2, accelerator="cpu")
if torch.distributed.get_rank() == 0:
    tensor = torch.ones(3)
    tensor.slow = Slow()
    work = torch.distributed.all_reduce(tensor, async_op=True)
    del tensor, work
    time.sleep(1.5)
    sys.last = Last()
else:
    time.sleep(1)
    torch.distributed.all_reduce(torch.ones(3))
"""


def test_no_thread_of_the_backend_outlives_the_interpreter(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert "released by the main thread: False" in done.stdout, done.stderr[-3000:]
    assert done.returncode == 0, done.stderr[-3000:]
