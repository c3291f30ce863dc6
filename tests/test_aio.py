"""The asyncio face: reads, cancellation in both directions, and every way in which a caller may leave."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psutil
import pytest

from omni_actors import OmniSystem
from omni_actors.aio import AsyncOmni, Opening
from omni_actors.errors import Aborted, ConfigError, InvalidRequest, SlowConsumer, StageCrashed, SystemClosed
from omni_actors.orchestrator.pieces import Input
from tests.support import endless_answers
from tests.support.endless_answers import ENDLESS, UNREAD_BYTES

WATCHDOG_S = 60.0


@pytest.fixture(scope="module")
def omni() -> Iterator[AsyncOmni]:
    """One system for the event loops of all tests."""

    async def opened() -> AsyncOmni:
        return await AsyncOmni.open(endless_answers.pipeline())

    omni = asyncio.run(opened())
    yield omni
    asyncio.run(omni.close())


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def watched() -> None:
        async with asyncio.timeout(WATCHDOG_S):
            await test()

    asyncio.run(watched(), debug=True)


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.sleep(0)  # tasks that were created begin
    while not condition():  # noqa: ASYNC110 - no event announces the condition
        await asyncio.sleep(0.002)


# what trio's face does


def test_a_generation_yields_outputs(omni: AsyncOmni) -> None:
    async def test() -> None:
        found = [(out.stage, out.modality, out.delta) async for out in omni.generate("hello")]
        assert found == [("short", "text", "hello")]
        generation = omni.submit({"script": [Input({"text": "a"})]}, ("text",), request_id="mine")
        assert generation.request_id == "mine"
        assert (await generation.text(), await generation.audio(), (await generation.collect()).text) == (
            "a",
            None,
            "a",
        )

    run(test)


def test_many_tasks_read_at_once(omni: AsyncOmni) -> None:
    async def test() -> None:
        answers = await asyncio.gather(*(omni.generate(str(number)).text() for number in range(50)))
        assert answers == [str(number) for number in range(50)]

    run(test)


def test_the_state_is_that_of_the_system(omni: AsyncOmni) -> None:
    async def test() -> None:
        assert omni.is_running
        assert await omni.check_health() == omni.health()
        await omni.wait_ready()
        assert b"omni_ring_payload_bytes" in omni.metrics.exposition()
        with pytest.raises(InvalidRequest, match="speed"):
            omni.generate("hello", speed=2)

    run(test)


@pytest.mark.parametrize("name", [name for name, _ in inspect.getmembers(OmniSystem) if name[0] != "_"])
def test_a_method_has_the_arguments_of_the_systems(name: str) -> None:
    original, ours = getattr(OmniSystem, name), getattr(AsyncOmni, name)
    if callable(original):
        assert inspect.signature(ours).parameters == inspect.signature(original).parameters
        assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(original)


def test_an_abort_can_be_awaited(omni: AsyncOmni) -> None:
    async def test() -> None:
        generation = omni.generate("x", modalities=ENDLESS)
        freed = await omni.abort(generation.request_id)
        assert list(freed.requests) == [generation.request_id]
        assert {reply.value["requests"] for replies in freed.replies.values() for reply in replies} == {0}
        assert omni.in_flight == 0

    run(test)


# cancellation, in both directions


def test_cancelling_a_task_aborts_its_request_in_every_stage(omni: AsyncOmni) -> None:
    async def test() -> None:
        generation = omni.generate("x", modalities=("text", *ENDLESS))  # kept, so that only the cancellation ends it
        reading = asyncio.create_task(generation.collect())
        await until(lambda: omni.in_flight == 1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert omni.in_flight == 0
        await until(lambda: b'omni_stage_requests{replica="0",stage="endless"} 0.0' in omni.metrics.exposition())
        with pytest.raises(Aborted):
            await anext(generation)

    run(test)


def test_a_time_limit_around_a_read_aborts_too_unless_it_is_shielded(omni: AsyncOmni) -> None:
    async def test() -> None:
        generation = omni.generate("x", modalities=ENDLESS)
        first = asyncio.ensure_future(generation.__anext__())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(first), 0.0)
        assert (await first).modality == "audio"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(generation.collect(), 0.05)
        assert omni.in_flight == 0

    run(test)


def test_an_event_loop_that_ends_aborts_what_its_tasks_read(omni: AsyncOmni) -> None:
    tasks = []

    async def test() -> None:
        tasks.append(asyncio.create_task(omni.generate("x", modalities=ENDLESS).collect()))
        await until(lambda: omni.in_flight == 1)

    run(test)
    assert omni.in_flight == 0


def test_an_event_loop_that_is_closed_during_a_read_harms_nothing(omni: AsyncOmni) -> None:
    loop = asyncio.new_event_loop()
    reading = loop.create_task(omni.generate("x", modalities=ENDLESS, deadline_s=0.05).collect())
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    run(lambda: until(lambda: omni.in_flight == 0))
    reading._log_destroy_pending = False  # type: ignore[attr-defined]
    reading.get_coro().close()  # type: ignore[union-attr]
    del reading


def test_dropping_a_generation_half_way_aborts_it(omni: AsyncOmni) -> None:
    async def test() -> None:
        async for _ in omni.generate("x", modalities=ENDLESS):
            break
        gc.collect()
        await until(lambda: omni.in_flight == 0)

    run(test)


def test_the_death_of_a_worker_reaches_the_task(omni: AsyncOmni, fixture_processes: set[int]) -> None:
    async def test() -> None:
        generation = omni.generate("x", modalities=ENDLESS, on_failure="fail")
        await anext(generation)
        os.kill(omni.health().stages["endless"][0].pid or 0, signal.SIGKILL)
        with pytest.raises(StageCrashed):
            await generation.collect()
        while not omni.health().ready:
            await omni.wait_changed()
        fixture_processes.add(omni.health().stages["endless"][0].pid or 0)

    run(test)


def test_a_slow_reader_has_the_bound_of_trios_face(omni: AsyncOmni) -> None:
    async def test() -> None:
        generation = omni.generate("x", modalities=ENDLESS)
        await anext(generation)
        await until(lambda: omni.in_flight == 0)
        with pytest.raises(SlowConsumer) as caught:
            await anext(generation)
        assert caught.value.bound == UNREAD_BYTES

    run(test)


# many prompts

WRONG: Any = 7
"""A prompt that fails at once."""


def test_map_answers_many_prompts(omni: AsyncOmni) -> None:
    async def test() -> None:
        async with omni.map(map(str, range(20)), concurrency=3) as answers:
            found = {answer.index: answer.text async for answer in answers}
        assert found == {number: str(number) for number in range(20)}
        with pytest.raises(InvalidRequest):
            await anext(omni.map([WRONG]))

    run(test)


def test_a_complete_answer_comes_before_an_error_of_the_prompts(omni: AsyncOmni) -> None:
    def prompts() -> Iterator[str]:
        yield "a"
        raise ZeroDivisionError

    async def test() -> None:
        async with omni.map(prompts(), concurrency=1) as answers:
            assert (await anext(answers)).text == "a"
            with pytest.raises(ZeroDivisionError):
                await anext(answers)
            assert [answer async for answer in answers] == []

    run(test)


def test_map_refuses_a_concurrency_that_is_no_number_of_requests(omni: AsyncOmni) -> None:
    async def test() -> None:
        with pytest.raises(InvalidRequest, match="from 1 on") as refused:
            omni.map(["a"], concurrency=0)
        assert refused.value.param == "concurrency"

    run(test)


def test_several_tasks_may_read_the_answers_of_a_map(omni: AsyncOmni) -> None:
    """More of them wait than there are answers left: all end."""

    async def test() -> None:
        answers = omni.map(["a", "b"], concurrency=1)
        found = list[str]()

        async def read() -> None:
            found.extend([answer.text async for answer in answers])

        await asyncio.gather(*[read() for _ in range(3)])
        assert sorted(found) == ["a", "b"]

    run(test)


def test_cancelling_a_map_aborts_its_requests(omni: AsyncOmni) -> None:
    async def test() -> None:
        answers = omni.map(["a", "b", "c"], modalities=ENDLESS, concurrency=2)
        reading = asyncio.ensure_future(answers.__anext__())
        await until(lambda: omni.in_flight == 2)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(lambda: omni.in_flight == 0)
        with pytest.raises(StopAsyncIteration):
            await anext(answers)

    run(test)


# the end of the system


def test_closing_ends_what_waits_and_every_later_call() -> None:
    async def test() -> None:
        before = psutil.Process().children()
        omni = await AsyncOmni.open(endless_answers.pipeline())
        reading = asyncio.create_task(omni.generate("x", modalities=ENDLESS).collect())
        waiting = asyncio.create_task(omni.wait_changed())
        await until(lambda: omni.in_flight == 1)
        await asyncio.gather(omni.close(), omni.close())
        assert psutil.Process().children() == before
        for task in (reading, waiting):
            with pytest.raises(SystemClosed):
                await task
        await omni.close()
        assert not omni.is_running
        with pytest.raises(SystemClosed):
            omni.generate("x")
        with pytest.raises(SystemClosed):
            await omni.check_health()

    run(test)


@pytest.mark.parametrize("moment", ["at once", "after a turn", "while a worker loads"])
def test_cancelling_while_it_opens_leaves_nothing(moment: str) -> None:
    process = psutil.Process()
    before = len(process.children())

    async def test() -> None:
        never_ready = {f"stages.{stage}.options.load_s": 3600.0 for stage in ("short", "endless")}
        opening = asyncio.ensure_future(_entered(AsyncOmni.open(endless_answers.pipeline(), overrides=never_ready)))
        if moment == "after a turn":
            await asyncio.sleep(0)
        elif moment == "while a worker loads":
            await until(lambda: len(process.children()) > before)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert len(process.children()) == before

    threads = threading.active_count()
    run(test)
    run(lambda: until(lambda: threading.active_count() <= threads))


async def _entered(opening: Opening) -> AsyncOmni:
    return await opening


def test_an_error_at_opening_has_its_type() -> None:
    async def test() -> None:
        with pytest.raises(ConfigError):
            await AsyncOmni.open("nothing")

    run(test)


def test_the_exception_of_the_block_is_raised_as_it_is() -> None:
    error = ArithmeticError("mine")

    async def test() -> None:
        async with AsyncOmni.open(endless_answers.pipeline(), wait_ready=False):
            raise error

    with pytest.raises(ArithmeticError) as caught:
        run(test)
    assert caught.value is error
