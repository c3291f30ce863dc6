"""A thinker and a talker that die after the prompt was found in the prefix cache.

In a file of its own: the workers of test_killed_stages.py have noise while its fixture lives.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from omni_actors import OmniSystem
from tests.support.closeness import assert_same_sound
from tests.support.killed_omni import Omni, checkpoint

pytestmark = [pytest.mark.voice, pytest.mark.timeout(300)]


class _Cached(Omni):
    """A pipeline whose thinker has a prefix cache."""

    def engines(self) -> dict[str, tuple[str, dict[str, Any]]]:
        engines = super().engines()
        name, options = engines["thinker"]
        return {**engines, "thinker": (name, {**options, "prefill_chunk": 8, "prefix_cache_mb": 1})}


@pytest.mark.slow
@pytest.mark.skipif("OMNI_ACTORS_TEST_NOISE" in os.environ, reason="noise may turn a choice of the next incarnation")
def test_a_thinker_killed_behind_a_prompt_of_its_prefix_cache(tmp_path: Path, fixture_processes: set[int]) -> None:
    """The next incarnation computes what the killed one had found. The next talker needs all rows, and gets them."""
    killed = _Cached("exact", "qwen2_5", checkpoint("qwen2_5", tmp_path))

    async def work(omni: OmniSystem) -> None:
        alone = await killed.hear(omni, killed.greedy)
        replays = 0
        while not replays:  # the stages may have finished before their deaths: then the cache is filled again first
            for stages in ((), ("thinker", "talker")):
                heard = await killed.hear(omni, killed.greedy, *stages, at=1)
                assert stages or not heard.replays
                assert (heard.text, heard.codes) == (alone.text, alone.codes)
                assert heard.journals["thinker"] == alone.journals["thinker"]
                assert_same_sound(heard.sound, alone.sound)
            replays = heard.replays

    with killed.running(fixture_processes) as shared_system:
        shared_system.run(work)
