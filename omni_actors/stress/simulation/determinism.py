"""Makes this process deterministic: everything random follows from one seed, and no exception goes unnoticed."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from trio._core import _run as trio_run


@contextmanager
def deterministic(draw: random.Random) -> Iterator[None]:
    """Make trio's task order and the ``random`` module follow from ``draw``, and disable garbage collection.

    trio shuffles the ready tasks with ``_r``, so that no program relies on their order. It has a switch, made for
    Hypothesis, that makes the order follow from ``_r`` alone. A garbage collection would close dropped streams at an
    arbitrary time.
    """
    state = random.getstate()
    random.seed(draw.getrandbits(64))
    gc.disable()
    try:
        with mock.patch.multiple(trio_run, _ALLOW_DETERMINISTIC_SCHEDULING=True, _r=draw):
            yield
    finally:
        gc.enable()
        random.setstate(state)


@contextmanager
def report_unraisable(report: Callable[[str, BaseException], None]) -> Iterator[None]:
    """Report what Python would only print: an exception of a finalizer, a coroutine that was never awaited."""
    with mock.patch.object(
        sys, "unraisablehook", lambda args: report(str(args.err_msg), args.exc_value or args.exc_type())
    ):
        yield
