"""Keeps what was computed of prompts, so that a prompt that begins like an earlier one need not compute it again.

Rules
1. A block is a whole prefill chunk. A prompt is cut at the same positions with and without the cache, and each chunk is
   computed alone. So an answer does not depend on what the cache has.
2. A block is found by a hash of the adapter, of all tokens before it and of its own.
3. A block without the rows for a downstream stage is not found for a request that needs them.
4. The blocks that were used last stay, up to ``max_bytes``. A block stays at least as long as those behind it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from torch import Tensor

from omni_actors.stages.adapters.options import Adapter
from omni_actors.stages.autoregressive.cache import KeyValues


class Block(NamedTuple):
    """What is kept of the positions of one block."""

    states: KeyValues
    rows: Tensor | None
    """What a downstream stage gets of these positions, (positions, hidden); None if no request needed it so far."""

    @property
    def size(self) -> int:
        """The positions."""
        return self.states[0][0].shape[1]

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors."""
        states = sum(tensor.nbytes for pair in self.states for tensor in pair)
        return states + (0 if self.rows is None else self.rows.nbytes)


class PrefixCache:
    """Blocks of ``size`` positions, up to ``max_bytes`` in all."""

    def __init__(self, size: int, max_bytes: int) -> None:
        self.size, self._max_bytes = size, max_bytes
        self._blocks: dict[bytes, Block] = {}
        """The one that was used last comes last."""
        self._bytes = self._queries = self._hits = 0

    def keys(self, tokens: Sequence[int], adapter: Adapter | None) -> list[bytes]:
        """Return the key of each whole block of a prompt. Another prompt has an equal key only where all is equal."""
        keys, key = [], b"" if adapter is None else adapter.digest.encode()
        for start in range(0, len(tokens) - self.size + 1, self.size):
            block = np.array(tokens[start : start + self.size], np.int64).tobytes()
            key = hashlib.blake2b(key + block, digest_size=32).digest()
            keys.append(key)
        return keys

    def find(self, keys: Sequence[bytes], *, with_rows: bool = False) -> list[Block]:
        """Return the blocks of the longest beginning of a prompt that is here. Counts the positions looked up.

        with_rows: whether blocks without rows are left out.
        """
        found = list(takewhile(lambda key: self._has(key, with_rows=with_rows), keys))
        self._queries += len(keys) * self.size
        self._hits += len(found) * self.size
        self._use(found)
        return [self._blocks[key] for key in found]

    def add(self, keys: Sequence[bytes], states: KeyValues, rows: Tensor | None = None) -> None:
        """Keep a block that was computed. keys: of the blocks before it, and its own. The rest: as in ``Block``."""
        if not self._has(keys[-1], with_rows=rows is not None):
            self._remove(keys[-1])
            self._blocks[keys[-1]] = block = Block(states, rows)
            self._bytes += block.nbytes
        self._use(keys)
        while self._bytes > self._max_bytes:
            self._remove(next(iter(self._blocks)))

    def _has(self, key: bytes, *, with_rows: bool) -> bool:
        block = self._blocks.get(key)
        return block is not None and not (with_rows and block.rows is None)

    def _remove(self, key: bytes) -> None:
        """Forget a block, if it is here."""
        if (block := self._blocks.pop(key, None)) is not None:
            self._bytes -= block.nbytes

    def _use(self, keys: Sequence[bytes]) -> None:
        """Note that the first blocks of a prompt are used (rule 4)."""
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks[key] = self._blocks.pop(key)

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()
        self._bytes = 0

    def gauges(self) -> Mapping[str, float]:
        """Return the positions looked up and found so far, as vLLM names them, and the bytes in use."""
        figures = {"queries": self._queries, "hits": self._hits, "bytes": self._bytes}
        return {f"prefix_cache_{name}": float(figure) for name, figure in figures.items()}
