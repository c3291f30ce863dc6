"""The main job, end to end, with the real models: answers in text and speech, through the death of any worker."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import AsyncIterator

import numpy as np
import pytest
import trio

from omni_actors import AudioChunk, OmniSystem
from omni_actors.errors import InvalidRequest, StageCrashed
from omni_actors.stages import assets

pytestmark = pytest.mark.voice

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name a famous painter.",
    "What is the largest ocean?",
    "How many days are in a week?",
    "What do bees make?",
    "Who wrote Hamlet?",
    "What is ice made of?",
)


@pytest.fixture
async def omni() -> AsyncIterator[OmniSystem]:
    for model in assets.NAMES:
        assets.prepare(model, print)
    async with OmniSystem.open("voice") as system:
        yield system


async def answer(omni: OmniSystem, *args: object, **kwargs: object) -> tuple[str, AudioChunk]:
    text, samples, rate = "", [np.zeros(0, np.float32)], 24_000
    async for out in omni.generate(*args, **kwargs):  # type: ignore[arg-type]
        if isinstance(out.delta, str):
            text += out.delta
        elif out.delta is not None:
            samples.append(out.delta.samples)
            rate = out.delta.sample_rate
    return text, AudioChunk(np.concatenate(samples), rate)


async def heard(omni: OmniSystem, clip: AudioChunk) -> str:
    return (await answer(omni, multi_modal_data={"audio": clip}, modalities=("transcript",)))[0]


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


async def test_a_question_is_answered_in_text_and_speech_written_and_spoken_alike(omni: OmniSystem) -> None:
    text, speech = await answer(omni, QUESTIONS[0], modalities=("text", "audio"))
    assert "Paris" in text
    assert np.abs(speech.samples).max() <= 1.0
    assert words(await heard(omni, speech)) == words(text)

    # The spoken question, asked with our own voice, enters at the ear and gets the answer of the written one.
    _, question = await answer(omni, script=QUESTIONS[0], modalities=("audio",))
    spoken, _ = await answer(omni, multi_modal_data={"audio": question}, modalities=("text",))
    assert "Paris" in spoken

    # Metrics tell one story: text before sound, stages in order, and bytes on every ring of the route.
    answers = omni.generate(QUESTIONS[0], modalities=("text", "audio"))
    final = [out async for out in answers][-1].metrics
    assert final is not None
    assert final.ttft_s < final.ttfa_s < final.total_s  # type: ignore[operator]
    assert final.audio_s == pytest.approx(speech.duration_s)
    assert {name: set(stage.sent_bytes) for name, stage in final.stages.items()} == {
        "llm": {"client.0", "acoustic.0"},
        "acoustic": {"vocoder.0"},
        "vocoder": {"client.0"},
    }
    assert all(size > 0 for stage in final.stages.values() for size in stage.sent_bytes.values())


async def test_requests_side_by_side_give_each_its_text_and_speech_comes_early(omni: OmniSystem) -> None:
    alone = [(await answer(omni, question, max_tokens=16))[0] for question in QUESTIONS]
    together: dict[str, str] = {}

    async def ask(question: str) -> None:
        together[question] = (await answer(omni, question, max_tokens=16))[0]

    async with trio.open_nursery() as nursery:
        for question in QUESTIONS:
            nursery.start_soon(ask, question)
    assert [together[question] for question in QUESTIONS] == alone

    # Speech starts before the text is complete: by the order of the outputs, not by a clock.
    order = [
        type(out.delta).__name__
        async for out in omni.generate("Write three sentences about the sea.", modalities=("text", "audio"))
        if out.delta is not None
    ]
    assert order.index("AudioChunk") < len(order) - 1 - order[::-1].index("str")


async def test_killed_workers_end_their_request_with_the_cause_and_come_back(omni: OmniSystem) -> None:
    _, question = await answer(omni, script=QUESTIONS[0], modalities=("audio",))
    for stage in ("whisper", "llm", "acoustic", "vocoder"):
        request = omni.generate(multi_modal_data={"audio": question}, modalities=("text", "audio"))
        pid = omni.health().stages[stage][0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(StageCrashed) as caught:
            async for _ in request:
                pass
        assert (caught.value.stage, caught.value.signal, caught.value.pid) == (stage, "SIGKILL", pid)
        text, speech = await answer(omni, QUESTIONS[0], modalities=("text", "audio"))
        assert "Paris" in text
        assert "paris" in words(await heard(omni, speech))
        assert omni.health().stages[stage][0].generation == 2


BAD_INPUT: tuple[tuple[dict[str, object], str], ...] = (
    ({"prompt": ""}, "messages"),
    ({"prompt": "word " * 4000}, "messages"),
    ({"prompt": "hello", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "hello", "no_such_parameter": 1}, "no_such_parameter"),
    ({"prompt": "hello", "modalities": ("smell",)}, "modalities"),
    ({"script": "", "modalities": ("audio",)}, "input"),
    ({"prompt": "what is it?", "multi_modal_data": {"image": b""}}, "multi_modal_data"),
    ({"multi_modal_data": {"audio": AudioChunk(np.zeros(0, np.float32), 16_000)}}, "audio"),
)


async def test_bad_input_is_refused_with_its_parameter_and_the_system_serves_on(omni: OmniSystem) -> None:
    for arguments, param in BAD_INPUT:
        with pytest.raises(InvalidRequest) as caught:
            await answer(omni, **arguments)
        assert (arguments, caught.value.param) == (arguments, param)
    assert "Paris" in (await answer(omni, QUESTIONS[0]))[0]
