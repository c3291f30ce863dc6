"""Iterators of segments that callers of the blocking and of the asyncio face pass on."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from omni_actors.aio import AsyncOmni
from omni_actors.errors import DeadlineExceeded, InputFailed, InvalidRequest
from omni_actors.orchestrator.pieces import Input
from omni_actors.sync import Omni
from tests.support.echo_systems import one_stage

WATCHDOG_S = 60.0


# The blocking face


@pytest.fixture(scope="module")
def omni() -> Iterator[Omni]:
    with Omni.open(one_stage(emits="text")) as omni:
        yield omni


def test_a_generator_is_read_as_its_answer_is(omni: Omni) -> None:
    answered, closed = threading.Event(), threading.Event()

    def segments() -> Iterator[str]:
        try:
            yield "one "
            assert answered.wait(WATCHDOG_S)
            yield "two"
        finally:
            closed.set()

    generation = omni.generate(script=segments())
    assert next(generation).delta == "one "
    answered.set()
    assert generation.text() == "two"
    assert closed.wait(WATCHDOG_S)


def test_any_iterator_is_read(omni: Omni) -> None:
    assert omni.submit({"script": iter([Input({"text": "a"}), Input({"text": "b"})])}, ("text",)).text() == "ab"
    assert omni.generate(script=map(str, range(3))).text() == "012"  # type: ignore[arg-type]


def test_a_generator_that_ends_its_program_ends_its_request_alone(omni: Omni) -> None:
    def segments() -> Iterator[str]:
        yield "x"
        raise SystemExit(3)

    with pytest.raises(InputFailed, match="SystemExit: 3"):
        omni.generate(script=segments()).text()
    assert omni.generate(script="y").text() == "y"


def test_an_exception_that_would_end_the_input_of_the_system_is_an_exception(omni: Omni) -> None:
    """The input would end without a word, and the answer with it."""

    def segments() -> Iterator[str]:
        yield "x"
        raise StopAsyncIteration("why")

    with pytest.raises(InputFailed, match="StopAsyncIteration: why"):
        omni.generate(script=segments()).text()


def test_the_exception_of_a_generator_is_raised_by_the_reader(omni: Omni) -> None:
    def segments() -> Iterator[str]:
        yield "x"
        raise ValueError("why")

    with pytest.raises(InputFailed, match="ValueError: why") as caught:
        omni.generate(script=segments()).text()
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_generator_that_blocks_delays_nobody_and_is_closed_when_it_goes_on(omni: Omni) -> None:
    going_on, closed = threading.Event(), threading.Event()

    def segments() -> Iterator[str]:
        try:
            assert going_on.wait(WATCHDOG_S)
            yield "x"
            yield "y"
        finally:
            closed.set()

    with pytest.raises(DeadlineExceeded):
        omni.generate(script=segments(), deadline_s=0.1).text()
    assert omni.generate(script="z").text() == "z"
    assert not closed.is_set()
    going_on.set()
    assert closed.wait(WATCHDOG_S)


def test_an_asynchronous_iterator_needs_an_event_loop(omni: Omni) -> None:
    async def segments() -> AsyncIterator[str]:
        yield "x"

    with pytest.raises(InvalidRequest, match="asyncio"):
        omni.generate(script=segments())


# The asyncio face


def run(test: Callable[[AsyncOmni], Awaitable[None]]) -> None:
    async def watched() -> None:
        async with asyncio.timeout(WATCHDOG_S), AsyncOmni.open(one_stage(emits="text")) as omni:
            await test(omni)

    asyncio.run(watched(), debug=True)


def test_an_asynchronous_iterator_runs_in_one_task_of_its_event_loop() -> None:
    variable = contextvars.ContextVar[str]("variable")
    queue, closed = asyncio.Queue[str](), asyncio.Event()

    async def segments() -> AsyncIterator[str]:
        try:
            async with asyncio.timeout(WATCHDOG_S):  # which works in one task only
                while segment := await queue.get():
                    yield variable.get() + segment
        finally:
            closed.set()

    async def test(omni: AsyncOmni) -> None:
        variable.set("> ")
        generation = omni.generate(script=segments())
        for word in ("one", "two"):
            queue.put_nowait(word)
            assert (await anext(generation)).delta == f"> {word}"
        queue.put_nowait("")
        assert await generation.text() == ""
        await closed.wait()

        closed.clear()
        generation = omni.generate(script=segments())
        queue.put_nowait("x")
        assert (await anext(generation)).delta == "> x"
        generation.abort()
        await closed.wait()

    run(test)


def test_an_asynchronous_iterator_that_raises_or_never_ends() -> None:
    closed = asyncio.Event()

    async def raising() -> AsyncIterator[str]:
        yield "x"
        raise ValueError("why")

    async def endless() -> AsyncIterator[str]:
        try:
            while True:
                yield "x"
        finally:
            closed.set()

    async def test(omni: AsyncOmni) -> None:
        with pytest.raises(InputFailed, match="ValueError: why"):
            await omni.generate(script=raising()).text()
        with pytest.raises(DeadlineExceeded):
            await omni.generate(script=endless(), deadline_s=0.1).text()
        await closed.wait()

        # The task that reads it is cancelled, as at the end of asyncio.run.
        generation = omni.generate(script=endless())
        await anext(generation)
        before = {each for each in asyncio.all_tasks() if "InEventLoop" in repr(each)}
        assert len(before) == 1
        before.pop().cancel()
        with pytest.raises(InputFailed, match="was cancelled"):
            await generation.text()

    run(test)
