"""Speech from text, and text from sound, that arrive while the request runs, with the real models."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator

import msgspec
import numpy as np
import pytest
import trio

from omni_actors import AudioChunk, OmniSystem
from omni_actors.config import load
from omni_actors.errors import InvalidRequest
from tests.support.closeness import assert_same_sound
from tests.support.echo_systems import OFTEN, pid_of
from tests.support.shared_system import SharedSystem, open_shared_system, with_shared_system
from tests.support.spoken_answers import sound_of

pytestmark = pytest.mark.voice

TEXT = "It is half past ten. The ferry costs 3.50 today, as ever! Will you come along? Bring a coat."
SPEECH = {"modalities": ("audio",), "seed": 3}


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int]) -> Iterator[SharedSystem]:
    voice = load("voice")
    stages = {
        name: msgspec.structs.replace(voice.stages[name], restart=OFTEN) for name in voice.stages if name != "llm"
    }
    stages["acoustic"] = msgspec.structs.replace(stages["acoustic"], inputs=())
    pipeline = msgspec.structs.replace(voice, stages=stages)
    with open_shared_system(lambda: OmniSystem.open(pipeline), fixture_processes) as shared_system:
        yield shared_system


async def whole(omni: OmniSystem) -> np.ndarray:
    return sound_of([out async for out in omni.generate(script=TEXT, **SPEECH)])


@with_shared_system
@pytest.mark.slow
async def test_words_give_the_sound_of_the_whole_text_and_the_first_sentence_at_once(omni: OmniSystem) -> None:
    spoken = trio.Event()

    async def words() -> AsyncIterator[str]:
        for word in TEXT.split(" "):
            if word == "Will":
                await spoken.wait()  # two sentences are complete, and the rest is not there
            yield word
            yield " "

    outputs = []
    with trio.fail_after(60):
        async for out in omni.generate(script=words(), **SPEECH):
            outputs.append(out)
            spoken.set()
    assert_same_sound(sound_of(outputs), await whole(omni))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["acoustic", "vocoder"])
def test_a_death_in_the_middle_of_the_text_changes_no_sample(shared_system: SharedSystem, stage: str) -> None:
    async def work(omni: OmniSystem) -> None:
        killed = trio.Event()

        async def letters() -> AsyncIterator[str]:
            for number, letter in enumerate(TEXT):
                if number == len(TEXT) // 2:
                    await killed.wait()
                yield letter

        outputs = []
        with trio.fail_after(60):
            async for out in omni.generate(script=letters(), **SPEECH):
                outputs.append(out)
                if not killed.is_set():
                    os.kill(pid_of(omni, stage), signal.SIGKILL)
                    killed.set()
        assert outputs[-1].metrics is not None
        assert outputs[-1].metrics.replays == 1
        assert_same_sound(sound_of(outputs), await whole(omni))

    shared_system.run(work)


@with_shared_system
async def test_text_without_a_word_is_refused_when_it_ends(omni: OmniSystem) -> None:
    async def spaces() -> AsyncIterator[str]:
        yield " "
        yield "\n"

    async def nothing() -> AsyncIterator[str]:
        return
        yield

    for text in (spaces(), nothing()):
        with pytest.raises(InvalidRequest) as caught:
            await omni.generate(script=text, **SPEECH).collect()
        assert (caught.value.param, caught.value.code) == ("input", "empty")


@pytest.mark.slow
@with_shared_system
async def test_live_sound_is_transcribed_as_the_whole_is_also_after_a_death(omni: OmniSystem) -> None:
    speech = await omni.generate(script="The capital of France is Paris.", **SPEECH).audio()
    assert speech is not None
    expected = await omni.generate(multi_modal_data={"audio": speech}, modalities=("transcript",)).text()

    async def parts() -> AsyncIterator[AudioChunk]:
        for number, samples in enumerate(np.array_split(speech.samples, 20)):
            if number == 10:
                os.kill(pid_of(omni, "whisper"), signal.SIGKILL)
            yield AudioChunk(samples, speech.sample_rate)

    generation = omni.generate(multi_modal_data={"audio": parts()}, modalities=("transcript",))
    answer = await generation.collect()
    assert answer.text == expected
    assert answer.metrics is not None
    assert answer.metrics.replays == 1


@with_shared_system
async def test_parts_of_a_recording_have_one_sample_rate_and_are_audio(omni: OmniSystem) -> None:
    second = np.zeros(16000, np.float32)
    for wrong in (AudioChunk(second, 8000), "text", AudioChunk(second.reshape(2, -1), 16000)):

        async def parts(wrong: object = wrong) -> AsyncIterator[object]:
            yield AudioChunk(second, 16000)
            yield wrong

        with pytest.raises(InvalidRequest):
            await omni.generate(multi_modal_data={"audio": parts()}, modalities=("transcript",)).collect()
    with pytest.raises(InvalidRequest, match="image 0"):
        omni.generate(multi_modal_data={"image": parts()}, modalities=("transcript",))
