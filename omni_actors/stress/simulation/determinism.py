"""Makes this process do the same again: one seed for all that draws, and nothing raised that nobody hears of."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trio._core import _run as trio_run

from omni_actors.worker import engine_loop as loop

CONGESTED_BYTES = 6_000
"""So that the few small chunks of a schedule congest an edge."""


@contextmanager
def deterministic(draw: random.Random) -> Iterator[None]:
    """Let all that draws draw from the seed.

    trio shuffles the tasks that are ready so that nobody relies on their order; it has a switch, for Hypothesis, that
    makes this follow from ``_r`` alone. Collecting garbage would let go of dropped streams at any time.
    """
    before = trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r, random.getstate(), loop.CONGESTED_BYTES
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r = True, draw  # type: ignore[misc]
    random.seed(draw.getrandbits(64))
    loop.CONGESTED_BYTES = CONGESTED_BYTES
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r = before[:2]  # type: ignore[misc]
        random.setstate(before[2])
        loop.CONGESTED_BYTES = before[3]


@contextmanager
def report_unraisable(on_unexpected_error: Callable[[str, BaseException], None]) -> Iterator[None]:
    """What Python would only print: an exception of a finalizer, an await that nobody waited for."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda args: on_unexpected_error(str(args.err_msg), args.exc_value or args.exc_type())
    try:
        yield
    finally:
        sys.unraisablehook = hook
