"""Rings to test, and real processes to share them with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import pytest
import ringbuf
from ringbuf import Ring

ROOT = Path(ringbuf.__file__).parent.parent
PROLOGUE = """
import os, signal, sys, time
from ringbuf import *
from ringbuf._words import CONSUMER, PRODUCER
ring = Ring.attach([int(fd) for fd in sys.argv[1:4]], generation=int(sys.argv[4]))
"""

Peer: TypeAlias = Callable[[Ring, str], "subprocess.Popen[str]"]


@pytest.fixture
def ring() -> Iterator[Ring]:
    """16 KiB of data area."""
    with Ring.create(16 << 10) as ring:
        yield ring


@pytest.fixture
def peer() -> Iterator[Peer]:
    """Run a script in another process, in which ``ring`` is attached. It is killed and reaped when the test is over."""
    with ExitStack() as stack:

        def start(ring: Ring, script: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", PROLOGUE + script, *map(str, ring.fds), str(ring.generation)],
                pass_fds=ring.fds,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start
