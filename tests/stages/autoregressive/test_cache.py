"""The key-value cache, against a list of lists."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.stages.autoregressive.cache import SlottedCache

HEADS, SIZE = 2, 3


def cells(values: Sequence[float]) -> torch.Tensor:
    """(heads, tokens, size), every number of a token the same."""
    return torch.tensor(values)[None, :, None].expand(HEADS, -1, SIZE)


class CheckedCache:
    """A ``SlottedCache`` of two layers beside a simple model of it."""

    def __init__(self, max_rows: int, max_length: int) -> None:
        self.cache = SlottedCache(max_rows, max_length, torch.float32, torch.device("cpu"))
        self.rows: list[list[float]] = []
        self.made = 0

    def add(self) -> None:
        assert self.cache.add_row() == len(self.rows)
        self.rows.append([])

    def remove(self, row: int) -> None:
        self.cache.remove_row(row)
        self.rows[row] = self.rows[-1]
        del self.rows[-1]

    @torch.inference_mode()
    def extend(self, rows: Sequence[int], count: int, value: float | None = None) -> None:
        positions, mask = self.cache.extend(rows, count)
        brought_on = [self.rows[row] for row in rows]
        starts = [len(row) for row in brought_on]
        assert positions.tolist() == [[start + i for i in range(count)] for start in starts]
        fresh = [
            [value if value is not None else float(self.made + n * count + i) for i in range(count)]
            for n in range(len(rows))
        ]
        self.made += count * len(rows)
        for row, new in zip(brought_on, fresh, strict=True):
            row += new
        longest = max(len(row) for row in brought_on)
        assert mask.shape == (len(rows), 1, count, longest)
        for n, start in enumerate(starts):
            for i in range(count):
                seen = start + i + 1
                assert mask[n, 0, i].tolist() == [0.0] * seen + [-math.inf] * (longest - seen)
        states = torch.stack([cells(new) for new in fresh])
        for layer in range(2):
            sign = -1 if layer else 1
            keys, values = self.cache.update(sign * states, 2 * sign * states, layer)
            assert keys.shape == values.shape == (len(rows), HEADS, longest, SIZE)
            for n, row in enumerate(brought_on):
                expected = cells([*row, *[0.0] * (longest - len(row))])
                torch.testing.assert_close(keys[n], sign * expected, rtol=0, atol=0, equal_nan=True)
                torch.testing.assert_close(values[n], 2 * sign * expected, rtol=0, atol=0, equal_nan=True)

    def check(self) -> None:
        assert self.cache.lengths == [len(row) for row in self.rows]
        for store in (*self.cache._keys, *self.cache._values):
            for row in range(len(store)):
                length = len(self.rows[row]) if row < len(self.rows) else 0
                assert not store[row, :, length:].any(), "a cell beyond a row's end is not zero"


@given(st.data())
def test_cache_holds_what_was_written_through_any_joins_leaves_and_growth(data: st.DataObject) -> None:
    checked = CheckedCache(max_rows=5, max_length=40)
    for _ in range(data.draw(st.integers(1, 25))):
        rows = len(checked.rows)
        act = data.draw(st.sampled_from(["add", "extend", "remove"]))
        if act == "add" and rows < 5:
            checked.add()
        elif act == "remove" and rows:
            checked.remove(data.draw(st.integers(0, rows - 1)))
        elif act == "extend" and rows:
            chosen = sorted(data.draw(st.sets(st.integers(0, rows - 1), min_size=1)))
            count = data.draw(st.integers(1, 9))
            if max(len(checked.rows[row]) for row in chosen) + count <= 40:
                checked.extend(chosen, count)
        checked.check()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_cache_zeroes_what_a_freed_row_leaves_behind(poison: float, row: int) -> None:
    checked = CheckedCache(max_rows=3, max_length=20)
    for n in range(3):
        checked.add()
        checked.extend([n], 2 + n, None if n != row else poison)
    checked.extend([row], 9, poison)
    checked.remove(row)
    checked.check()
    checked.add()
    checked.extend([0, 1, 2], 1)
    assert all(store[:3].isfinite().all() for store in (*checked.cache._keys, *checked.cache._values))


def test_cache_keeps_no_memory_when_it_is_empty() -> None:
    checked = CheckedCache(max_rows=4, max_length=1000)
    checked.add()
    checked.extend([0], 300)
    assert checked.cache._keys[0].shape == (1, HEADS, 512, SIZE)
    checked.remove(0)
    assert not checked.cache._keys
    checked.add()
    checked.extend([0], 3)
    assert checked.cache._keys[0].shape == (1, HEADS, 256, SIZE)


def test_cache_refuses_rows_and_tokens_beyond_its_limits() -> None:
    cache = SlottedCache(1, 10, torch.float32, torch.device("cpu"))
    cache.add_row()
    with pytest.raises(ValueError, match="all 1 rows"):
        cache.add_row()
    with pytest.raises(ValueError, match="11 tokens; the cache holds 10"):
        cache.extend([0], 11)
