"""Input that arrives while its request runs: order, backpressure, hostile iterators, and deaths in the middle of it."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from omni_actors import AudioChunk
from omni_actors.errors import Aborted, DeadlineExceeded, InputFailed, InvalidRequest, Quarantined, StageCrashed
from omni_actors.generation import Generation
from omni_actors.orchestrator.pieces import Input
from omni_actors.prompts import LONGEST_QUESTION
from omni_actors.system import OmniSystem
from tests.support.echo_systems import pid_of, read, two_stages, until
from tests.support.frozen import freeze
from tests.support.shared_system import SharedSystem, open_shared_system, with_shared_system

RING_BYTES = 4096


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int]) -> Iterator[SharedSystem]:
    overrides = {"limits.retain_bytes": 50_000, "stages.first.accepts": ("script", "messages", "audio")}
    opening = lambda: OmniSystem.open(two_stages(), overrides=overrides)  # noqa: E731
    with open_shared_system(opening, fixture_processes) as shared_system:
        yield shared_system


class Writer:
    """Segments that the test sends one by one; the iterator raises those that are exceptions."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[Any](100)
        self.started, self.closed = trio.Event(), trio.Event()

    async def segments(self) -> AsyncIterator[Any]:
        self.started.set()
        try:
            async for segment in self._receive:
                if isinstance(segment, Exception):
                    raise segment
                yield segment
        finally:
            self._receive.close()
            self.closed.set()

    def write(self, segment: Any) -> None:
        self._send.send_nowait(segment)

    def end(self) -> None:
        self._send.close()


def speak(omni: OmniSystem, segments: Any, **arguments: Any) -> Generation:
    return omni.generate(script=segments, modalities=("text", "audio"), **arguments)


async def fails(generation: Generation, error: type[Exception], *, match: str | None = None) -> Any:
    with pytest.raises(error, match=match) as caught:
        await read(generation)
    return caught.value


async def texts(generation: Generation) -> dict[str, str]:
    found = {"first": "", "second": ""}
    for output in await read(generation):
        found[output.stage] += str(output.delta or "")
    return found


@with_shared_system
async def test_each_segment_is_answered_before_the_next_one_is_there(omni: OmniSystem) -> None:
    writer = Writer()
    generation = omni.generate(script=writer.segments(), modalities=("audio",))
    with trio.fail_after(30):
        for word in ("one ", "two ", "three"):
            writer.write(word)
            assert (await anext(generation)).delta == word
        writer.end()
        last = await anext(generation)
    assert last.finished
    assert last.metrics is not None
    assert last.metrics.sent_bytes.keys() == {"first.0"}
    await writer.closed.wait()


@with_shared_system
async def test_a_question_that_arrives_in_parts_is_sent_whole(omni: OmniSystem) -> None:
    async def parts() -> AsyncIterator[str]:
        yield "Why is "
        yield "the sky blue?"

    assert (await omni.generate(parts(), modalities=("audio",)).text()) == "Why is the sky blue?"


@with_shared_system
async def test_a_question_that_never_ends_is_refused_at_a_bound(omni: OmniSystem) -> None:
    async def parts() -> AsyncIterator[str]:
        while True:
            yield "x" * (LONGEST_QUESTION // 4)

    with pytest.raises(InvalidRequest, match="characters") as refused:
        await omni.generate(parts()).text()
    assert refused.value.param == "prompt"


@with_shared_system
async def test_what_is_there_precedes_live_input(omni: OmniSystem) -> None:
    """A live recording has one index, and the question refers to it."""

    def sound(value: float) -> AudioChunk:
        return AudioChunk(np.full(8, value, np.float32), 16_000)

    async def parts() -> AsyncIterator[AudioChunk]:
        yield sound(0.2)
        yield sound(0.3)

    media = {"audio": [sound(0.1), parts()]}
    outputs = await read(omni.generate("Who is it?", multi_modal_data=media, modalities=("audio",)))
    first, question, *live = [output for output in outputs if not output.finished]
    assert [output.data["index"] for output in (first, *live)] == [0, 1, 1]
    assert [output.tensors["audio"].numpy()[0] for output in (first, *live)] == np.float32([0.1, 0.2, 0.3]).tolist()
    refers = [part["index"] for part in question.data["messages"][0]["content"] if part["type"] == "audio"]
    assert refers == [0, 1]


@with_shared_system
async def test_a_stopped_worker_holds_the_iterator_back_and_nothing_is_lost(omni: OmniSystem) -> None:
    taken, pid = 0, pid_of(omni, "first")

    async def segments() -> AsyncIterator[str]:
        nonlocal taken
        for taken in range(1, 61):
            yield f"{taken:1000}"

    freeze(pid)
    try:
        generation = speak(omni, segments())
        await until(lambda: taken > 0)
        await trio.testing.wait_all_tasks_blocked(0.02)  # nothing else can happen: the worker is stopped
        assert taken < 20  # the ring has room for a few
    finally:
        os.kill(pid, signal.SIGCONT)
    expected = "".join(f"{number:1000}" for number in range(1, 61))
    assert await texts(generation) == {"first": expected, "second": expected}


@with_shared_system
async def test_a_segment_larger_than_the_rings_passes(omni: OmniSystem) -> None:
    async def segments() -> AsyncIterator[str]:
        yield "x" * 100 * RING_BYTES
        yield ""
        yield "y"

    assert len((await texts(speak(omni, segments())))["second"]) == 100 * RING_BYTES + 1


@with_shared_system
async def test_an_exception_of_the_iterator_ends_the_request_with_it(omni: OmniSystem) -> None:
    writer = Writer()
    generation = omni.generate(script=writer.segments(), modalities=("audio",))
    writer.write("x")
    assert (await anext(generation)).delta == "x"
    writer.write(KeyError("why"))
    error = await fails(generation, InputFailed, match="the iterator of the script raised KeyError: 'why'")
    assert isinstance(error.cause, KeyError)
    assert error.__cause__ is error.cause
    assert omni.in_flight == 0


class Broken:
    """An iterator that raises where it is asked to."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __aiter__(self) -> Broken:
        self._raise("aiter")
        return self

    async def __anext__(self) -> str:
        self._raise("anext")
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._raise("aclose")

    def _raise(self, where: str) -> None:
        if where == self._where:
            raise RuntimeError(where)


@pytest.mark.parametrize("where", ["aiter", "anext", "aclose"])
def test_an_iterator_that_raises_anywhere_ends_its_own_request_only(shared_system: SharedSystem, where: str) -> None:
    async def work(omni: OmniSystem) -> None:
        error = await fails(speak(omni, Broken(where)), InputFailed)
        assert str(error.cause) == where
        assert (await texts(speak(omni, "x")))["first"] == "x"

    shared_system.run(work)


@pytest.mark.parametrize("segment", [5, None, b"x", Input({"text": "x"}), ["x"]])
def test_a_segment_of_a_wrong_type_is_refused(shared_system: SharedSystem, segment: Any) -> None:
    async def work(omni: OmniSystem) -> None:
        writer = Writer()
        generation = speak(omni, writer.segments())
        writer.write("fine")
        writer.write(segment)
        error = await fails(generation, InvalidRequest, match="script: expected text")
        assert error.param == "script"
        await writer.closed.wait()

    shared_system.run(work)


@with_shared_system
async def test_pieces_that_are_none_or_cannot_be_encoded_are_refused(omni: OmniSystem) -> None:
    for piece, message in (("x", "a piece of input was expected"), (Input({"x": object()}), "cannot be encoded")):
        writer = Writer()
        generation = omni.submit({"script": writer.segments()}, ("audio",))
        writer.write(piece)
        await fails(generation, InvalidRequest, match=message)
        await writer.closed.wait()


@with_shared_system
async def test_an_iterator_without_segments_is_an_empty_input(omni: OmniSystem) -> None:
    writer = Writer()
    writer.end()
    assert await texts(speak(omni, writer.segments())) == {"first": "", "second": ""}


@with_shared_system
async def test_the_deadline_ends_an_iterator_that_waits_or_never_waits(omni: OmniSystem) -> None:
    writer, closed = Writer(), trio.Event()
    await fails(speak(omni, writer.segments(), deadline_s=0.05), DeadlineExceeded)
    await writer.closed.wait()

    async def restless() -> AsyncIterator[str]:
        try:
            while True:
                yield ""
        finally:
            closed.set()

    await fails(speak(omni, restless(), deadline_s=0.05), DeadlineExceeded)
    await closed.wait()


@with_shared_system
async def test_the_end_of_the_request_closes_the_iterator(omni: OmniSystem) -> None:
    aborted, dropped = Writer(), Writer()
    generations = [speak(omni, writer.segments()) for writer in (aborted, dropped)]
    dropped.write("x")
    with trio.fail_after(30):
        await aborted.started.wait()
        generations[0].abort()
        await aborted.closed.wait()
        assert (await anext(generations[1])).delta == "x"
        generations.clear()
        await dropped.closed.wait()
    await until(lambda: omni.in_flight == 0)


# Deaths


async def with_deaths(omni: OmniSystem, *stages: str, size: int = 10, **arguments: Any) -> Generation:
    """Return a generation whose input goes on after the workers of ``stages`` were killed behind its third output."""
    writer = Writer()
    generation = omni.submit({"script": writer.segments()}, ("audio",), **arguments)
    for number in range(3):
        writer.write(Input({"text": f"{number} "}, {"x": np.zeros(size, np.uint8)}))
        assert (await anext(generation)).delta == f"{number} "
    for stage in stages:
        os.kill(pid_of(omni, stage), signal.SIGKILL)
    for number in range(3, 6):
        writer.write(Input({"text": f"{number} "}, {"x": np.zeros(size, np.uint8)}))
    writer.end()
    return generation


@pytest.mark.parametrize("stages", [("first",), ("second",), ("first", "second")], ids="+".join)
def test_after_a_death_all_segments_so_far_are_sent_again(shared_system: SharedSystem, stages: tuple[str, ...]) -> None:
    async def work(omni: OmniSystem) -> None:
        generation = await with_deaths(omni, *stages)
        outputs = await read(generation)
        assert [str(output.delta or "") for output in outputs] == ["3 ", "4 ", "5 ", ""]
        assert outputs[-1].metrics is not None
        assert outputs[-1].metrics.replays == 1

    shared_system.run(work)


@with_shared_system
async def test_input_beyond_the_limit_is_not_kept(omni: OmniSystem) -> None:
    generation = await with_deaths(omni, size=30_000)
    assert len(await read(generation)) == 4  # as long as no worker dies, it needs no more than its latest segments

    generation = await with_deaths(omni, "first", size=30_000)
    error = await fails(generation, StageCrashed)
    assert error.not_replayed == "more than 50000 bytes of its input have arrived (limits.retain_bytes)"


@with_shared_system
async def test_a_request_that_is_not_replayed_keeps_no_input(omni: OmniSystem) -> None:
    generation = await with_deaths(omni, "first", on_failure="fail")
    await fails(generation, StageCrashed)
    generation = await with_deaths(omni, "second", on_failure="fail")
    await fails(generation, StageCrashed)


@with_shared_system
async def test_live_input_that_ends_workers_is_refused_when_it_arrives_again(omni: OmniSystem) -> None:
    async def poisoned(*texts: str) -> AsyncIterator[Input]:
        for text in texts:
            yield Input({"text": text, "echo": {"raise": "step"} if text == "poison" else {}})

    def ask(*texts: str) -> Generation:
        return omni.submit({"script": poisoned(*texts)}, ("audio",))

    await fails(ask("a", "poison"), StageCrashed)
    await fails(ask("a", "poison"), Quarantined)
    assert len(await read(ask("a", "b"))) == 3


@with_shared_system
async def test_a_request_that_waits_does_not_read_its_iterator(omni: OmniSystem) -> None:
    os.kill(pid_of(omni, "first"), signal.SIGKILL)
    await until(lambda: not omni.health().ready)
    started = False

    async def segments() -> AsyncIterator[str]:
        nonlocal started
        started = True
        assert omni.health().ready
        yield "x"

    generation = speak(omni, segments())
    await trio.testing.wait_all_tasks_blocked()
    assert not started or omni.health().ready
    assert (await texts(generation))["second"] == "x"


@with_shared_system
async def test_abort_all_ends_live_input(omni: OmniSystem) -> None:
    writer = Writer()
    generation = speak(omni, writer.segments())
    writer.write("x")
    omni.abort_all("enough")
    await fails(generation, Aborted)
    await writer.closed.wait()
