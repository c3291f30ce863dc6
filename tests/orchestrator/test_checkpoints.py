"""The descriptors of checkpoint memory that the parent holds for a request."""

from __future__ import annotations

import os

import pytest

from omni_actors.orchestrator.checkpoints import CheckpointMemories


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("closes", [1, 2])
def test_a_later_memory_replaces_the_one_before_it_and_all_are_closed_at_the_end(closes: int) -> None:
    memories = CheckpointMemories()
    first, second, other = (os.memfd_create(name, 0) for name in ("first", "second", "other"))
    memories.keep("a", first)
    memories.keep("b", other)
    assert (memories.of("a"), memories.of("b"), memories.of("c")) == (first, other, None)
    memories.keep("a", second)
    assert (memories.of("a"), is_open(first)) == (second, False)
    assert not os.get_inheritable(second), "no worker inherits it"
    for _ in range(closes):
        memories.close()
    assert (is_open(second), is_open(other)) == (False, False)
