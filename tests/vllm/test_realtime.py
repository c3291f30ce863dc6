"""A hands-free session on the pipeline "voice_vllm": its language model runs on vLLM."""

from __future__ import annotations

import asyncio

import pytest

from bench.realtime.kills import Asked, ask
from bench.realtime.server import config, serving
from bench.realtime.user import noise_below, say, talking

QUESTION = "What is the capital of France?"


@pytest.mark.voice
@pytest.mark.timeout(400)  # the pipeline loads in it
def test_a_session_hears_and_speaks() -> None:
    async def talk() -> Asked:
        async with (
            serving(pipeline="voice_vllm") as server,
            talking(server.client, config(), noise_below(say(QUESTION), 20)) as user,
        ):
            asked = Asked(0, QUESTION)
            await ask(user, asked)
            assert not user.errors
            return asked

    asked = asyncio.run(talk())
    assert asked.status == "completed", asked.reason
    assert "Paris" in asked.answer
    assert 1 < asked.sound_s < 15
