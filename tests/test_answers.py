"""Collecting answers: ``Generation.collect``, ``text``, ``audio``, ``save``, and ``OmniSystem.map``."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import trio
import trio.testing

import omni_actors
from omni_actors import OmniSystem
from omni_actors.config import Limits, Pipeline, Stage
from omni_actors.errors import InvalidRequest, Overloaded, TemporarilyRefused
from omni_actors.orchestrator.pieces import Input
from tests.support.echo_systems import pid_of, until
from tests.support.frozen import freeze
from tests.support.served_engines import LEVEL, RATE, WORD_S
from tests.support.shared_system import SharedSystem, open_shared_system, with_shared_system

WATCHDOG_S = 60.0


def speaking(**limits: Any) -> Pipeline:
    """A stage that returns its prompt, and one that makes a sound for each word of a script."""
    return Pipeline(
        name="speaking",
        limits=Limits(**limits),
        stages={
            "text": Stage(engine="echo", accepts=("messages",), emits="text"),
            "voice": Stage(engine="tests.support.served_engines:Speaker", accepts=("script",), emits="audio"),
        },
    )


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int]) -> Iterator[SharedSystem]:
    with open_shared_system(lambda: OmniSystem.open(speaking()), fixture_processes) as shared_system:
        yield shared_system


@with_shared_system
async def test_an_answer_is_collected_once_and_may_be_asked_for_again(omni: OmniSystem) -> None:
    generation = omni.generate("hello")
    assert await generation.text() == "hello"
    assert await generation.audio() is None
    answer = await generation.collect()
    assert (answer.text, answer.audio, answer.index, answer.error) == ("hello", None, 0, None)
    assert answer.metrics is not None
    assert set(answer.metrics.stages) == {"text"}
    assert answer.data.keys() == {"text"}

    sound = await omni.generate(script="one two three", modalities=("audio",)).audio()
    assert sound is not None
    assert sound.sample_rate == RATE
    assert sound.duration_s == pytest.approx(3 * WORD_S)
    np.testing.assert_allclose(sound.samples, LEVEL)


def test_tasks_that_collect_at_once_all_get_the_whole_answer(shared_system: SharedSystem, tmp_path: Path) -> None:
    """One reads the outputs, and the others wait for it: none has a part of the answer, or an empty one."""
    found = list[Any]()

    async def read(method: Callable[[], Awaitable[Any]]) -> None:
        found.append(await method())

    async def collect(omni: OmniSystem) -> None:
        generation = omni.generate(script="one two three", modalities=("audio",))
        async with trio.open_nursery() as nursery:
            for method in (generation.audio, partial(generation.save, tmp_path / "a.wav"), generation.audio):
                nursery.start_soon(read, method)

    shared_system.run(collect)
    assert found[0] is not None
    assert found[0].duration_s == pytest.approx(3 * WORD_S)
    assert all(each is found[0] for each in found)
    assert soundfile.info(tmp_path / "a.wav").duration == pytest.approx(3 * WORD_S)


def test_a_read_that_is_cancelled_or_fails_takes_nothing_from_the_others(
    shared_system: SharedSystem, tmp_path: Path
) -> None:
    """Also not when it has read a part of the answer: the next one begins where it was."""

    async def read_in_parts(omni: OmniSystem) -> None:
        generation = omni.generate(script="one two three", modalities=("audio",))
        with pytest.raises(soundfile.LibsndfileError):
            await generation.save(tmp_path / "nowhere" / "a.wav")  # when the first sound has come
        with trio.CancelScope() as reading:
            generation._on_interval = lambda *_: reading.cancel()  # when the next one has come
            await generation.collect()
        assert reading.cancelled_caught
        found = await generation.save(tmp_path / "a.wav")
        assert isinstance(found, omni_actors.AudioChunk)
        assert found.duration_s == pytest.approx(3 * WORD_S)

    shared_system.run(read_in_parts)
    assert soundfile.info(tmp_path / "a.wav").duration == pytest.approx(3 * WORD_S)


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "mp3"])
def test_save_writes_the_sound_in_the_format_of_the_suffix(
    shared_system: SharedSystem, suffix: str, tmp_path: Path
) -> None:
    async def save(omni: OmniSystem) -> None:
        generation = omni.generate(script="one two three", modalities=("audio",))
        saved = await generation.save(tmp_path / f"a.{suffix}")
        assert saved is not None
        assert await generation.audio() is saved
        assert await generation.save(tmp_path / f"b.{suffix}") is saved, "also from a collected answer"

    shared_system.run(save)
    for name in "ab":
        info = soundfile.info(tmp_path / f"{name}.{suffix}")
        assert (info.format, info.samplerate) == (suffix.upper(), RATE)
        assert info.duration == pytest.approx(3 * WORD_S, abs=0.1), "an mp3 is padded"


def test_save_refuses_an_unknown_format_before_it_reads_and_writes_no_empty_file(
    shared_system: SharedSystem, tmp_path: Path
) -> None:
    async def save(omni: OmniSystem) -> None:
        generation = omni.generate("hello")
        with pytest.raises(ValueError, match=r"accepted: \.flac, \.mp3, \.ogg, \.wav"):
            await generation.save(tmp_path / "answer.txt")
        assert await generation.save(tmp_path / "answer.wav") is None
        assert await generation.text() == "hello"

    shared_system.run(save)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("concurrency", [None, 3, pytest.param(1000, marks=pytest.mark.slow)])
async def test_map_answers_many_prompts_without_being_refused(concurrency: int | None) -> None:
    prompts = [f"prompt {number}" for number in range(100)]
    most = 0
    async with OmniSystem.open(speaking(max_requests=8)) as omni:
        with trio.fail_after(WATCHDOG_S):
            async with omni.map(prompts, concurrency=concurrency) as answers:
                found = {}
                async for answer in answers:
                    most = max(most, omni.in_flight)
                    found[answer.index] = answer.text
        assert found == dict(enumerate(prompts))
        assert most <= min(concurrency or 8, 8)
        assert omni.in_flight == 0


@with_shared_system
async def test_map_refuses_a_concurrency_that_is_no_number_of_requests(omni: OmniSystem) -> None:
    for concurrency in ("2", 2.5, 0, -3, True):
        with pytest.raises(InvalidRequest, match="from 1 on") as refused:
            omni.map(["a"], concurrency=concurrency)  # type: ignore[arg-type]
        assert refused.value.param == "concurrency"


async def test_map_waits_while_other_requests_fill_the_system() -> None:
    pipeline = speaking(max_requests=1)
    async with OmniSystem.open(pipeline) as omni:
        worker = pid_of(omni, "text")
        freeze(worker)  # so that the first request holds its place
        other = omni.generate("mine")
        with pytest.raises(Overloaded):
            omni.generate("refused")
        async with trio.open_nursery() as nursery:

            async def read_later() -> None:
                await trio.testing.wait_all_tasks_blocked()  # each of the prompts was refused
                os.kill(worker, signal.SIGCONT)
                await other.text()

            nursery.start_soon(read_later)
            async with omni.map(["a", "b"]) as answers:
                assert {answer.text async for answer in answers} == {"a", "b"}


@pytest.mark.slow
async def test_map_tries_again_when_a_stage_refuses_a_request_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many times as its bound allows; then the answer has the error."""
    monkeypatch.setattr("omni_actors.system.batch.ATTEMPTS", 3)
    engine = "tests.support.refusing_engine:RefusingEngine"
    stage = Stage(engine=engine, options={"refusals": 5}, accepts=("messages",), emits="text")
    async with OmniSystem.open(Pipeline(name="refusing", stages={"text": stage})) as omni:
        with trio.fail_after(WATCHDOG_S):
            async with omni.map(["a", "b"], concurrency=1, keep_errors=True) as answers:
                first, second = [answer async for answer in answers]
    assert isinstance(first.error, TemporarilyRefused)
    assert (first.error.code, first.text) == ("no_room", "")
    assert (second.text, second.error) == ("b", None)


@with_shared_system
async def test_map_raises_the_error_of_a_request_or_keeps_it_as_an_answer(omni: OmniSystem) -> None:
    prompts: list[Any] = ["a", 5, "b"]
    with pytest.raises(InvalidRequest, match="prompt: expected") as failed:  # noqa: PT012
        async with omni.map(prompts) as answers:
            async for _ in answers:
                pass
    assert failed.value.index == 1
    async with omni.map(prompts, keep_errors=True) as answers:
        found = {answer.index: answer async for answer in answers}
    assert (found[0].text, found[2].text) == ("a", "b")
    assert isinstance(found[1].error, InvalidRequest)


async def test_leaving_map_aborts_its_requests() -> None:
    endless = {"stages.text.options": {"fan_out": 1_000_000, "step_s": 0.01}}
    async with OmniSystem.open(speaking(), overrides=endless) as omni:
        async with trio.open_nursery() as nursery:

            async def leave() -> None:
                await until(lambda: omni.in_flight == 2)
                nursery.cancel_scope.cancel()

            nursery.start_soon(leave)
            async with omni.map(["a", "b"]) as answers:
                async for _ in answers:
                    pytest.fail("an endless answer is complete")
        await until(lambda: not omni.in_flight)


@with_shared_system
async def test_a_loop_over_map_may_be_broken_off(omni: OmniSystem) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        async with omni.map(["a", "b", "c"], modalities=("text",)) as answers:
            async for _ in answers:
                break
        del answers
        gc.collect()
    assert not found, "nothing is left to close"


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"script": 5, "modalities": ("audio",)}, "script"),
        ({"prompt": "hi", "modalities": "text"}, "modalities"),
        ({"prompt": "hi", "multi_modal_data": [{"audio": 5}]}, "multi_modal_data"),
        ({"prompt": "hi", "multi_modal_data": {1: 5, "audios": 5}}, "multi_modal_data"),
        ({"prompt": "hi", "deadline_s": -1}, "deadline_s"),
    ],
)
def test_an_argument_of_a_wrong_type_is_an_invalid_request(
    shared_system: SharedSystem, arguments: dict[str, Any], param: str
) -> None:
    async def generate(omni: OmniSystem) -> None:
        with pytest.raises(InvalidRequest) as refusal:
            omni.generate(**arguments)
        assert refusal.value.param == param

    shared_system.run(generate)


@with_shared_system
async def test_inputs_of_a_wrong_type_are_an_invalid_request(omni: OmniSystem) -> None:
    for inputs in ([Input({})], {"messages": Input({})}, {"messages": (Input({}) for _ in range(1))}):
        with pytest.raises(InvalidRequest) as refusal:
            omni.submit(inputs, ("text",))  # type: ignore[arg-type]
        assert refusal.value.param == "inputs"


async def test_overrides_are_taken_as_a_mapping_and_as_keywords() -> None:
    given = {"limits.max_requests": 3, "limits.replays": 0}
    async with OmniSystem.open(speaking(), overrides=given, **{"limits.replays": 1}) as omni:
        assert (omni.pipeline.limits.max_requests, omni.pipeline.limits.replays) == (3, 1)


def test_the_package_lists_its_names() -> None:
    assert set(omni_actors.__all__) <= set(dir(omni_actors))
    assert all(getattr(omni_actors, name) is not None for name in omni_actors.__all__)


@with_shared_system
async def test_map_raises_an_error_of_the_prompts_as_it_is(omni: OmniSystem) -> None:
    def prompts() -> Iterator[str]:
        yield "one"
        raise ZeroDivisionError

    async def answers_of(omni: OmniSystem) -> None:
        async with omni.map(prompts(), modalities=("text",)) as answers:
            async for _ in answers:
                pass

    with pytest.raises(ZeroDivisionError):
        await answers_of(omni)
