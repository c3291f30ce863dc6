"""Garbage collection in a process that serves many requests at a time."""

from __future__ import annotations

import gc

MIDDLE_PER_FULL = 1000
"""Collections of the middle generation before a full one. Python's own number is 10."""


def make_full_collections_rare() -> None:
    """Exempt all objects that exist now from garbage collection, and collect the oldest ones rarely from now on.

    A full collection visits every object of every request in flight: with 10,000 requests it takes about a second, in
    which the process does nothing else. Requests leave no cycles behind, so it finds nothing of theirs.
    """
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, MIDDLE_PER_FULL)
