"""Rings to test, and processes to share them with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import ringbuf
from ringbuf import Ring
from tests.ringbuf.descriptors import Peer

ROOT = Path(ringbuf.__file__).parent.parent
PROLOGUE = """
import os, signal, sys, time
from ringbuf import *
from ringbuf._words import CONSUMER, PRODUCER

def attach(numbers):
    generation, *fds = map(int, numbers.split(","))
    return Ring.attach(fds, generation=generation)

def wait_until_asleep(column):
    while not ring._segment.words[column.waits]:
        time.sleep(0.001)

ring, *others = map(attach, sys.argv[1:])
"""


@pytest.fixture
def ring() -> Iterator[Ring]:
    """16 KiB of data area."""
    with Ring.create(16 << 10) as ring:
        yield ring


@pytest.fixture
def peer() -> Iterator[Peer]:
    """Run a script in another process, in which ``ring`` and ``others`` are attached. It is reaped at the end."""
    with ExitStack() as stack:

        def start(script: str, *rings: Ring) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    PROLOGUE + script,
                    *(",".join(map(str, (ring.generation, *ring.fds))) for ring in rings),
                ],
                pass_fds=[fd for ring in rings for fd in ring.fds],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start
