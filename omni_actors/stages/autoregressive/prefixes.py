"""Keeps the keys and values of prompts, so that a prompt that begins like an earlier one need not compute them again.

Rules
1. A block is a whole prefill chunk. A prompt is cut at the same positions with and without the cache, and each chunk is
   computed alone. So an answer does not depend on what the cache has.
2. A block is found by a hash of the adapter, of all tokens before it and of its own.
3. The blocks that were used last stay, up to ``max_bytes``. A block stays at least as long as those behind it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import takewhile

import numpy as np

from omni_actors.stages.adapters.options import Adapter
from omni_actors.stages.autoregressive.cache import KeyValues


class PrefixCache:
    """Blocks of ``block`` positions, up to ``max_bytes`` in all."""

    def __init__(self, block: int, max_bytes: int) -> None:
        self._block, self._max_bytes = block, max_bytes
        self._blocks: dict[bytes, KeyValues] = {}
        """The one that was used last comes last."""
        self._bytes = self._queries = self._hits = 0

    def keys(self, tokens: Sequence[int], adapter: Adapter | None) -> list[bytes]:
        """Return the key of each whole block of a prompt. Another prompt has an equal key only where all is equal."""
        keys, key = [], b"" if adapter is None else adapter.digest.encode()
        for start in range(0, len(tokens) - self._block + 1, self._block):
            block = np.array(tokens[start : start + self._block], np.int64).tobytes()
            key = hashlib.blake2b(key + block, digest_size=32).digest()
            keys.append(key)
        return keys

    def find(self, keys: Sequence[bytes]) -> list[KeyValues]:
        """Return the blocks of the longest beginning of a prompt that is here. Counts the positions looked up."""
        found = list(takewhile(self._blocks.__contains__, keys))
        self._queries += len(keys) * self._block
        self._hits += len(found) * self._block
        self._use(found)
        return [self._blocks[key] for key in found]

    def add(self, keys: Sequence[bytes], block: KeyValues) -> None:
        """Keep a block that was computed. keys: of the blocks before it, and its own."""
        if keys[-1] not in self._blocks:
            self._blocks[keys[-1]] = block
            self._bytes += _size(block)
        self._use(keys)
        while self._bytes > self._max_bytes:
            self._bytes -= _size(self._blocks.pop(next(iter(self._blocks))))

    def _use(self, keys: Sequence[bytes]) -> None:
        """Note that the first blocks of a prompt are used (rule 3)."""
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


def _size(block: KeyValues) -> int:
    return sum(tensor.nbytes for pair in block for tensor in pair)
