"""Which sources of a request still have chunks to send."""

from __future__ import annotations

from collections.abc import Iterable

from omni_actors.stages.base import Chunk


class OpenSources:
    """The sources of one request that have not sent their last chunk yet; true while there is one.

    sources: ``StageRequest.sources``. An engine keeps one of these per request and calls ``update`` with each chunk.
    """

    def __init__(self, sources: Iterable[str]) -> None:
        self._open = set(sources)

    def __bool__(self) -> bool:
        return bool(self._open)

    def update(self, chunk: Chunk) -> None:
        """Close the chunk's source if this is its last chunk."""
        if chunk.last:
            self._open.discard(chunk.source)
