"""Journals: entries are added once, none may be missing, and long ones are cut to fit into control messages."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.protocol import journal, messages
from omni_actors.protocol.journal import Journal, JournalCorrupted, slices
from omni_actors.protocol.messages import Decided, JournalPart


def decided(first: int, *entries: tuple[int, ...]) -> Decided:
    return Decided("stage", first, entries)


def test_known_entries_are_skipped_and_new_ones_returned() -> None:
    kept = Journal()
    assert kept.add(decided(0, (1,), (2, 3))) == decided(0, (1,), (2, 3))
    assert kept.add(decided(0, (1,), (2, 3))) is None
    assert kept.add(decided(1, (2, 3), (), (4,))) == decided(2, (), (4,))
    assert kept.entries == [(1,), (2, 3), (), (4,)]


def test_a_missing_entry_is_refused_and_changes_nothing() -> None:
    kept = Journal()
    kept.add(decided(0, (1,)))
    with pytest.raises(JournalCorrupted, match="decisions of 'stage' from 2 on, where 1 are known"):
        kept.add(decided(2, (3,)))
    assert kept.entries == [(1,)]


def test_an_entry_that_fits_into_no_message_is_refused_and_changes_nothing() -> None:
    kept = Journal()
    kept.add(decided(0, (1,), tuple(range(journal.SLICE_DECISIONS))))
    with pytest.raises(JournalCorrupted, match="an output of 'stage' has 10001 decisions"):
        kept.add(decided(2, (3,), tuple(range(journal.SLICE_DECISIONS + 1))))
    assert len(kept.entries) == 2


@given(
    st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9).map(tuple), max_size=12),
    st.integers(0, 5),
)
def test_slices_hold_every_entry_once_in_order(entries: list[tuple[int, ...]], first: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "SLICE_DECISIONS", 10)
        parts = list(slices("stage", first, entries))
    kept = Journal()
    kept.entries = [()] * first
    for part in parts:
        assert sum(len(entry) + 1 for entry in part.entries) <= 10
        kept.add(part)
    assert kept.entries[first:] == entries
    sizes = [[len(entry) + 1 for entry in part.entries] for part in parts]
    assert all(sizes), "no slice is empty"
    assert all(sum(one) + other[0] > 10 for one, other in pairwise(sizes)), "a slice is as long as it may be"


def test_the_longest_slice_fits_into_a_control_message() -> None:
    entry = (2**63 - 1,) * 15
    for part in slices("stage", 0, [entry] * 5_000):
        assert len(messages.encode(JournalPart(1, part))) <= messages.MAX_BYTES
