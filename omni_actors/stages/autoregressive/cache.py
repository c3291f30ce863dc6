"""A key-value cache in which each row (slot) contains one sequence of its own length.

Rules
1. The rows in use are 0 .. len(lengths) - 1, without gaps: when a row is freed, the last row moves into it.
2. A forward over neighbouring rows works on views of them. A forward over any other rows works on a gathered copy.
3. A cell beyond the length of its row is zero. The attention mask hides such cells, but a mask cannot hide NaN (NaN -
   inf is NaN, and 0 * NaN is NaN). So the cache zeroes the cells of a row that moves or is freed.
4. The engine calls ``extend`` once before each forward to place the new tokens. The model then calls ``update`` once
   per layer, which writes them and returns the used part: rows x heads x longest sequence.
5. Memory doubles on demand, up to ``max_rows`` x ``max_length``, and is freed when the last row is freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import Cache

KeyValues: TypeAlias = Sequence[tuple[Tensor, Tensor]]
"""The keys and values of neighbouring positions of one sequence, (heads, positions, head size) each, by layer."""

_FIRST_LENGTH = 256


class SlottedCache(Cache):
    """A cache as transformers' models take it, for sequences of different lengths.

    max_rows: sequences. max_length: tokens of one sequence. Each layer's keys and values are (rows, heads, length, head
    size), in the dtype of the layer's first write.
    """

    def __init__(self, max_rows: int, max_length: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layers=[])
        self.lengths: list[int] = []
        """The tokens in each row that is in use."""
        self._max_rows, self._max_length = max_rows, max_length
        self._dtype, self._device = dtype, device
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._capacity = (0, 0)
        self._longest = 0
        self._rows: slice | Tensor = slice(0, 0)
        self._row_index, self._positions = (torch.empty(0, dtype=torch.int64) for _ in range(2))

    @property
    def device(self) -> torch.device:
        return self._device

    @torch.inference_mode()
    def add_row(self) -> int:
        """Add an empty row after the others and return its number. Raises ValueError if all rows are in use."""
        if len(self.lengths) == self._max_rows:
            raise ValueError(f"all {self._max_rows} rows are in use")
        self.lengths.append(0)
        self._reserve(len(self.lengths), 1)
        return len(self.lengths) - 1

    @torch.inference_mode()
    def remove_row(self, row: int) -> None:
        """Free ``row``; the last row moves into it."""
        last = len(self.lengths) - 1
        if row != last:
            moved, before = self.lengths[last], self.lengths[row]
            for store in (*self._keys, *self._values):
                store[row, :, :moved] = store[last, :, :moved]
                store[row, :, moved:before] = 0
            self.lengths[row] = moved
        for store in (*self._keys, *self._values):
            store[last, :, : self.lengths[last]] = 0
        self.lengths.pop()
        if not self.lengths:
            self._keys, self._values, self._capacity = [], [], (0, 0)

    @torch.inference_mode()
    def read(self, row: int, begin: int, count: int) -> KeyValues:
        """Return a copy of ``count`` positions of a row."""
        positions = slice(begin, begin + count)
        stores = zip(self._keys, self._values, strict=True)
        return [(keys[row, :, positions].clone(), values[row, :, positions].clone()) for keys, values in stores]

    @torch.inference_mode()
    def append(self, row: int, block: KeyValues) -> None:
        """Add positions to a row that were read earlier, wherever they are now.

        Raises ValueError if the row would exceed ``max_length``.
        """
        begin = self.lengths[row]
        end = begin + block[0][0].shape[1]
        self._reserve(row + 1, end)
        for layer, (keys, values) in enumerate(block):
            if layer == len(self._keys):
                self._keys.append(self._allocate(keys[None]))
                self._values.append(self._allocate(values[None]))
            self._keys[layer][row, :, begin:end] = keys
            self._values[layer][row, :, begin:end] = values
        self.lengths[row] = end

    @torch.inference_mode()
    def extend(self, rows: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
        """Make room for ``count`` more tokens in each of ``rows`` (in increasing order). The next forward must fill it.

        Returns the new tokens' positions, int64 (rows, count), and their causal mask, to be added to the attention
        scores: (rows, 1, count, longest) in the cache's dtype, 0 up to the token's own position, -inf beyond. Raises
        ValueError if a row would exceed ``max_length``.
        """
        starts = [self.lengths[row] for row in rows]
        self._longest = max(starts) + count
        self._reserve(rows[-1] + 1, self._longest)
        index = torch.tensor(rows, device=self._device)
        neighbours = rows[-1] - rows[0] + 1 == len(rows)
        self._rows = slice(rows[0], rows[-1] + 1) if neighbours else index
        self._row_index = index[:, None]
        self._positions = torch.tensor(starts, device=self._device)[:, None] + torch.arange(count, device=self._device)
        hidden = torch.arange(self._longest, device=self._device) > self._positions[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, float("-inf"))
        for row, start in zip(rows, starts, strict=True):
            self.lengths[row] = start + count
        return self._positions, mask

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new tokens' states, (rows, heads, count, head size); return all keys and values of these rows."""
        if layer_idx == len(self._keys):
            self._keys.append(self._allocate(key_states))
            self._values.append(self._allocate(value_states))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[self._row_index, :, self._positions] = key_states.transpose(1, 2)
        values[self._row_index, :, self._positions] = value_states.transpose(1, 2)
        return keys[:, :, : self._longest][self._rows], values[:, :, : self._longest][self._rows]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths, default=0)

    def _allocate(self, states: Tensor) -> Tensor:
        rows, length = self._capacity
        return torch.zeros(rows, states.shape[1], length, states.shape[3], dtype=states.dtype, device=self._device)

    def _reserve(self, rows: int, length: int) -> None:
        old_rows, old_length = self._capacity
        if rows <= old_rows and length <= old_length:
            return
        if length > self._max_length:
            raise ValueError(f"a row of {length} tokens; the cache holds {self._max_length}")
        new_rows = old_rows if rows <= old_rows else min(max(rows, 2 * old_rows), self._max_rows)
        new_length = old_length if length <= old_length else max(length, 2 * old_length, _FIRST_LENGTH)
        new_length = min(new_length, self._max_length)
        self._capacity = (new_rows, new_length)
        for stores in (self._keys, self._values):
            for layer, old in enumerate(stores):
                stores[layer] = self._allocate(old)
                stores[layer][:old_rows, :, :old_length] = old
