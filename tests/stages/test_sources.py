from __future__ import annotations

from omni_actors.stages.base import Chunk
from omni_actors.stages.sources import OpenSources


def test_a_source_is_open_until_its_last_chunk() -> None:
    sources = OpenSources(("client", "thinker"))
    for seq, source, last, expected in (
        (0, "client", False, True),
        (1, "client", True, True),
        (0, "thinker", False, True),
        (1, "thinker", True, False),
    ):
        sources.update(Chunk(source=source, seq=seq, last=last, tensors={}, data={}))
        assert bool(sources) is expected
    assert not OpenSources(())
