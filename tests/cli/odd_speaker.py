"""An engine whose sound has a rate that MP3 does not know. Workers import this module by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omni_actors.stages.base import Chunk
from tests.support.served_engines import Speaker

RATE = 20_000


class OddSpeaker(Speaker):
    """Speaks at ``RATE``."""

    def _pieces(self, chunk: Chunk) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        for tensors, data in super()._pieces(chunk):
            yield tensors, {**data, "sample_rate": RATE}
