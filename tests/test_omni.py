"""Qwen3-Omni's three stages in real workers, with rings and signals; a tiny checkpoint with random weights."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from omni_actors import AudioChunk, OmniSystem
from omni_actors.config import Pipeline, Restart, Stage
from omni_actors.errors import InvalidRequest
from omni_actors.outputs import Output
from tests.support.closeness import assert_same_sound
from tests.support.echo_systems import generation_of, pid_of, wait_restarted
from tests.support.shared_system import SharedSystem, open_shared_system, with_shared_system
from tests.support.spoken_answers import SPOKEN, STORY, read, sound_of, text_of
from tiny_models import qwen3 as tiny

pytestmark = pytest.mark.slow  # make test has the same stages in one process: stages/qwen3/test_parity.py


def pipeline(model: Path) -> Pipeline:
    def stage(engine: str, **more: Any) -> Stage:
        often = Restart(intensity=100)  # the tests of one system kill more often than a service should survive
        return Stage(engine=engine, model=str(model), threads=1, restart=often, **more)

    stages = {
        "thinker": stage("qwen3_thinker", accepts=("audio", "image", "messages", "video"), emits="text"),
        "talker": stage("qwen3_talker", inputs=("thinker",)),
        "code2wav": stage("qwen3_code2wav", inputs=("talker",), emits="audio"),
    }
    return Pipeline(name="tiny", stages=stages)


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedSystem]:
    model = tiny.save(tmp_path_factory.mktemp("omni"), text_eos=0.0, codec_eos=0.0)
    opening = lambda: OmniSystem.open(pipeline(model))  # noqa: E731
    with open_shared_system(opening, fixture_processes, clear_choices=True) as shared_system:
        yield shared_system


@with_shared_system
async def test_each_stage_begins_before_its_upstream_stage_has_ended(omni: OmniSystem) -> None:
    outputs = await read(omni.generate(STORY, **{**SPOKEN, "max_tokens": 400}))
    assert len(text_of(outputs)) > 3
    assert len(sound_of(outputs)) == 60 * 1920 - 555
    metrics = outputs[-1].metrics
    assert metrics is not None
    thinker, talker, code2wav = (metrics.stages[name] for name in ("thinker", "talker", "code2wav"))
    assert talker.first_output_s < thinker.finished_s
    assert code2wav.first_output_s < talker.finished_s
    assert metrics.ttfa_s < talker.finished_s


@with_shared_system
async def test_only_outputs_for_the_client_pass_through_the_parent(omni: OmniSystem) -> None:
    outputs = await read(omni.generate(STORY, **SPOKEN))
    metrics = outputs[-1].metrics
    assert metrics is not None
    thinker = metrics.stages["thinker"].sent_bytes
    hidden = 4 * 64
    rows = thinker["talker.0"] / hidden
    assert rows > 24 + 20, "one row per token of the prompt and of the answer"
    assert thinker["client.0"] < 24 * 150, "only text"
    assert metrics.stages["code2wav"].sent_bytes["client.0"] < sound_of(outputs).nbytes + 40 * 200


@with_shared_system
async def test_text_alone_needs_no_talker(omni: OmniSystem) -> None:
    outputs = await read(omni.generate(STORY, max_tokens=24))
    metrics = outputs[-1].metrics
    assert metrics is not None
    assert set(metrics.stages) == {"thinker"}
    assert set(metrics.stages["thinker"].sent_bytes) == {"client.0"}
    assert text_of(outputs) == text_of(await read(omni.generate(STORY, **SPOKEN)))


@with_shared_system
async def test_an_image_and_a_recording_change_the_text_and_the_speech(omni: OmniSystem) -> None:
    seen = np.random.default_rng(0).integers(0, 255, (96, 64, 3), np.uint8)
    sound = np.sin(np.arange(27_200) * 0.09).astype(np.float32) * 0.3
    media = {"audio": AudioChunk(sound, 16_000), "image": seen}
    both = await read(omni.generate("what is it ?", multi_modal_data=media, **SPOKEN))
    blind = await read(omni.generate("what is it ?", multi_modal_data={"audio": media["audio"]}, **SPOKEN))
    assert text_of(both) != text_of(blind)
    assert not np.array_equal(sound_of(both), sound_of(blind))


@with_shared_system
async def test_a_recording_that_arrives_live_extends_one_request(omni: OmniSystem) -> None:
    """The thinker collects it, and begins when it is complete; the answer is that of the whole recording."""
    sound = np.sin(np.arange(27_200) * 0.09).astype(np.float32) * 0.3
    given = {"request_id": "live", **SPOKEN}
    whole = await read(omni.generate("what is it ?", multi_modal_data={"audio": AudioChunk(sound, 16_000)}, **given))
    in_flight = []

    async def segments() -> AsyncIterator[AudioChunk]:
        for begin in range(0, len(sound), 6000):
            yield AudioChunk(sound[begin : begin + 6000], 16_000)
            await trio.sleep(0.02)
            in_flight.append(omni.in_flight)

    outputs = await read(omni.generate("what is it ?", multi_modal_data={"audio": segments()}, **given))
    assert in_flight == [1] * 5, "one request, all the while"
    assert {output.request_id for output in outputs} == {"live"}
    assert text_of(outputs) == text_of(whole)
    assert_same_sound(sound_of(outputs), sound_of(whole))


@with_shared_system
async def test_eight_concurrent_requests_get_the_answers_of_each_alone(omni: OmniSystem) -> None:
    asked = [(STORY[: 14 + 4 * n], {**SPOKEN, "talker_max_tokens": 20 + 5 * n, "seed": n}) for n in range(8)]
    asked[3][1]["talker_temperature"] = 0.9
    asked[5][1]["temperature"] = 1.0
    alone = [await read(omni.generate(prompt, **params)) for prompt, params in asked]
    together: dict[int, list[Output]] = {}

    async def one(n: int) -> None:
        together[n] = await read(omni.generate(asked[n][0], **asked[n][1]))

    async with trio.open_nursery() as nursery:
        for n in range(8):
            nursery.start_soon(one, n)
    for n, outputs in enumerate(alone):
        assert text_of(together[n]) == text_of(outputs)
        assert_same_sound(sound_of(together[n]), sound_of(outputs))


@pytest.mark.parametrize(
    "killed",
    [
        ("talker", "code2wav"),
        ("talker",),
        ("code2wav",),
        ("thinker", "talker"),
        ("thinker", "talker", "code2wav"),
    ],
    ids="-".join,
)
def test_a_killed_stage_changes_nothing_for_the_client(shared_system: SharedSystem, killed: tuple[str, ...]) -> None:
    params = {**SPOKEN, "max_tokens": 400, "temperature": 1.0, "talker_temperature": 0.9, "seed": 7}

    async def work(omni: OmniSystem) -> None:
        expected = await read(omni.generate(STORY, **params))

        replays = 0
        while not replays:  # the stages may have finished before their deaths
            before = {stage: generation_of(omni, stage) for stage in killed}

            def kill() -> None:
                for stage in killed:
                    os.kill(pid_of(omni, stage), signal.SIGKILL)

            outputs = await read(omni.generate(STORY, **params), kill, behind=1)
            assert text_of(outputs) == text_of(expected)
            assert_same_sound(sound_of(outputs), sound_of(expected))
            assert outputs[-1].metrics is not None
            replays = outputs[-1].metrics.replays
            for stage, generation in before.items():  # the answer may end before the deaths are noticed
                await wait_restarted(omni, stage, generation + 1)

    shared_system.run(work)


@with_shared_system
async def test_a_thinker_killed_in_mid_answer_goes_on_behind_its_last_token(omni: OmniSystem) -> None:
    params = {**SPOKEN, "max_tokens": 300, "temperature": 1.0, "seed": 7}
    expected = await read(omni.generate(STORY, **params))
    pieces = sum(isinstance(out.delta, str) for out in expected)
    for at in (1, pieces // 3):
        replays = 0
        while not replays:  # the thinker may have finished before its death
            outputs, texts, before = [], 0, generation_of(omni, "thinker")
            async for out in omni.generate(STORY, **params):
                outputs.append(out)
                texts += isinstance(out.delta, str)
                if texts == at and isinstance(out.delta, str):
                    os.kill(pid_of(omni, "thinker"), signal.SIGKILL)
            assert text_of(outputs) == text_of(expected)
            assert_same_sound(sound_of(outputs), sound_of(expected))
            metrics = outputs[-1].metrics
            assert metrics is not None
            replays = metrics.replays
            await wait_restarted(omni, "thinker", before + 1)  # the answer may end before the death is noticed
        assert replays == 1


@with_shared_system
async def test_an_unknown_speaker_is_refused_by_name(omni: OmniSystem) -> None:
    with pytest.raises(InvalidRequest, match="'unknown'; accepted: aiden, chelsie, ethan") as refused:
        await read(omni.generate(STORY, **SPOKEN, speaker="unknown"))
    assert refused.value.param == "speaker"
    chelsie, ethan = [
        sound_of(await read(omni.generate(STORY, **SPOKEN, speaker=name))) for name in ("Chelsie", "ethan")
    ]
    assert not np.array_equal(chelsie, ethan)
