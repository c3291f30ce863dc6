"""A process that has nothing to do with the system and multiplies matrices when told to.

What a stage pays for any company on a machine's other core, for the cache and the memory that they share, is not the
system's doing: it is measured beside what the system's own stages cost it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bench.omni.pipelines import TALKER_NICE

PROGRAM = """
import ctypes, os, signal
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the benchmark, however that ends
os.nice({nice})  # as a talker's worker
import torch
torch.set_num_threads(1)
weights = [torch.randn(512, 1536) for _ in range(8)]  # 25 MB, a talker's layers
states = torch.randn(4, 512)
print("ready", flush=True)
while True:
    for weight in weights:
        (states @ weight).softmax(-1)
"""


class Stranger:
    """Open it with ``stranger``; it stands still until it is told to compute."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @contextmanager
    def computing(self) -> Iterator[None]:
        self._process.send_signal(signal.SIGCONT)
        try:
            yield
            if self._process.poll() is not None:
                raise RuntimeError(f"the stranger has ended, by {self._process.returncode}")
        finally:
            self._process.send_signal(signal.SIGSTOP)


@contextmanager
def stranger() -> Iterator[Stranger]:
    """Leaving the block has ended it."""
    command = [sys.executable, "-c", PROGRAM.format(nice=TALKER_NICE)]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=one_thread) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                raise RuntimeError("the stranger did not start")
            process.send_signal(signal.SIGSTOP)
            yield Stranger(process)
        finally:
            process.kill()
