"""Slow readers and stalled readers: what happens to their requests and to other requests."""

from __future__ import annotations

from itertools import pairwise

import pytest
import trio
from trio.testing import MockClock

from omni_actors.errors import Aborted, DeadlineExceeded, Overloaded, SlowConsumer
from omni_actors.generation import Generation
from omni_actors.orchestrator.readers import PIECES_A_TURN
from omni_actors.protocol.messages import Address
from tests.support.simulated_system import (
    NOT_PAUSABLE,
    PIECE,
    PIECES,
    WATCHDOG_S,
    numbers,
    open_simulated_system,
    read,
    until,
)

LAST = Address("second", 0)


# backpressure


async def test_an_unread_request_is_paused_and_continues_when_it_is_read(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as system:
        generation = system.ask()
        await system.until_paused()
        assert 100_000 < system.unread < 300_000
        before = system.unread
        await trio.sleep(100)
        assert system.unread == before
        assert len(await read(system.ask())) == PIECES, "other requests continue"
        assert numbers(await read(generation)) == list(range(PIECES))
        assert system.unread == 0


async def test_an_engine_that_cannot_pause_is_bounded_by_output_bytes(autojump_clock: MockClock) -> None:
    async with open_simulated_system(NOT_PAUSABLE, output_bytes=500_000) as system:
        generation = system.ask()
        await until(lambda: system.ended("SlowConsumer") == 1)
        assert system.unread == 0
        with pytest.raises(SlowConsumer) as caught:
            await read(generation)
        assert caught.value.limit == "output_bytes"


async def test_a_stage_that_restarts_a_paused_request_pauses_it(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as system:
        generation = system.ask()
        await system.until_paused()
        before = system.unread
        system.spawner.living[LAST].kill()
        await until(lambda: system.omni.health().stages["second"][0].restarts == 1 and system.omni.health().ready)
        engine = system.spawner.living[LAST].engine
        assert engine is not None
        await trio.sleep(100)
        assert not engine.busy
        assert system.unread == before
        outputs = await read(generation)
        assert numbers(outputs) == list(range(PIECES))
        assert outputs[-1].metrics is not None
        assert outputs[-1].metrics.replays == 1


async def test_a_library_caller_that_reads_answers_in_turn_is_not_paused(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as system:
        generations = [system.ask(whole=None) for _ in range(4)]
        await until(lambda: system.unread > 4 * PIECE * PIECES)
        assert system.gauge("requests_paused") == 0
        for generation in reversed(generations):
            assert len(await read(generation)) == PIECES


async def test_a_cancelled_reader_takes_no_piece(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as system:
        generation = system.ask(pieces=3)
        await until(lambda: system.unread > 3 * PIECE)
        with trio.CancelScope() as scope:
            scope.cancel()
            await anext(aiter(generation))
        assert scope.cancelled_caught
        assert numbers(await read(generation)) == [0, 1, 2]


async def test_other_tasks_run_while_a_reader_takes_what_has_arrived(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as system:
        generation = system.ask(whole=None)
        await until(lambda: system.unread > PIECE * PIECES)
        await trio.sleep(1)  # the request has ended
        taken, seen = 0, list[int]()

        async def look() -> None:
            while True:
                seen.append(taken)
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            async for _ in generation:
                taken += 1
            nursery.cancel_scope.cancel()
        assert taken == PIECES
        most = max(after - before for before, after in pairwise(seen))
        assert PIECES_A_TURN <= most <= 2 * PIECES_A_TURN, "trio runs the tasks of a turn in any order"


# bounds


async def test_a_complete_unread_answer_takes_a_place(autojump_clock: MockClock) -> None:
    async with open_simulated_system(max_requests=1, window_bytes=10_000_000) as system:
        generation = system.ask()
        await until(lambda: system.gauge("requests_in_flight") == 1 and system.unread > PIECE * PIECES)
        await trio.sleep(1)
        assert system.omni.in_flight == 1
        with pytest.raises(Overloaded):
            system.ask()
        assert system.ended("done") == 0
        await read(generation)
        assert (system.omni.in_flight, system.ended("done")) == (0, 1)


async def test_a_small_complete_answer_takes_no_place(autojump_clock: MockClock) -> None:
    async with open_simulated_system(max_requests=1) as system:
        generation = system.ask(pieces=2)
        await until(lambda: system.omni.in_flight == 0)
        assert len(await read(system.ask(pieces=2))) == 2
        assert system.unread > 0
        assert len(await read(generation)) == 2
        assert system.unread == 0


async def test_the_deadline_lasts_until_everything_is_read(autojump_clock: MockClock) -> None:
    async with open_simulated_system(window_bytes=10_000_000) as system:
        generation = system.ask(deadline_s=50)
        await until(lambda: system.unread > PIECE * PIECES)
        await trio.sleep(40)
        assert (await anext(aiter(generation))).data["n"] == 0
        await trio.sleep(15)
        assert (system.unread, system.omni.in_flight, system.ended("DeadlineExceeded")) == (0, 0, 1)
        with pytest.raises(DeadlineExceeded):
            await read(generation)


@pytest.mark.parametrize("how", ["abort", "by name", "drop"])
async def test_an_abort_frees_complete_unread_output(autojump_clock: MockClock, how: str) -> None:
    async with open_simulated_system(window_bytes=10_000_000) as system:
        generation = system.ask()
        await until(lambda: system.unread > PIECE * PIECES)
        await trio.sleep(1)
        if how == "drop":
            del generation
        else:
            generation.abort() if how == "abort" else system.omni.abort(generation.request_id)
            with pytest.raises(Aborted):
                await read(generation)
        await until(lambda: system.unread == 0)
        assert system.ended("Aborted") == 1


async def test_room_for_several_requests_is_made_at_once_or_not_at_all(autojump_clock: MockClock) -> None:
    async with open_simulated_system(max_requests=3) as system:
        slow = [system.ask() for _ in range(2)]
        await until(lambda: system.gauge("requests_paused") == 2)
        await trio.sleep(2)
        assert not system.omni.make_room(3)
        assert system.omni.in_flight == 2
        assert system.omni.make_room(2)
        for generation in slow:
            with pytest.raises(SlowConsumer):
                await read(generation)


async def test_a_full_system_ends_the_slowest_reader_after_its_grace(autojump_clock: MockClock) -> None:
    async with open_simulated_system(max_requests=3) as system:
        slow = [system.ask() for _ in range(3)]
        await until(lambda: system.gauge("requests_paused") == 3)
        with pytest.raises(Overloaded):
            system.ask()
        await trio.sleep(2)
        for generation in (slow[0], slow[2]) * 2:  # the second piece gives the first one back
            await anext(aiter(generation))
        assert len(await read(system.ask())) == PIECES
        with pytest.raises(SlowConsumer) as caught:
            await read(slow[1])
        assert (caught.value.limit, caught.value.bound, caught.value.read_bytes_s) == ("max_requests", 3, 0)
        assert caught.value.waited_s > 2
        for generation in (slow[0], slow[2]):
            assert len(await read(generation)) == PIECES - 2


async def test_the_total_is_bounded_when_no_engine_can_pause(autojump_clock: MockClock) -> None:
    async with open_simulated_system(NOT_PAUSABLE, unread_bytes=1_500_000) as system:
        generations = [system.ask() for _ in range(4)]
        highest = 0.0
        for _ in range(1000):
            await trio.sleep(0.001)
            highest = max(highest, system.unread)
        assert 1_000_000 < highest <= 1_500_000
        assert system.ended("SlowConsumer") == 3
        outcomes = []
        for generation in generations:
            try:
                outcomes.append(len(await read(generation)))
            except SlowConsumer as error:
                outcomes.append(error.limit)
        assert sorted(outcomes, key=str) == [PIECES, *["unread_bytes"] * 3]


async def test_whole_answers_complete_one_by_one_under_pressure(autojump_clock: MockClock) -> None:
    """The answers are four times the bound together. A reader that collects one frees nothing before its end."""
    async with open_simulated_system(unread_bytes=3_000_000) as system:
        done, highest = [], 0.0

        async def collect() -> None:
            generation = system.ask(whole=True)
            done.append(len(await read(generation)))
            nonlocal highest
            highest = max(highest, system.unread)
            generation.abort()

        with trio.fail_after(WATCHDOG_S):
            async with trio.open_nursery() as nursery:
                for _ in range(12):
                    nursery.start_soon(collect)
        assert done == [PIECES] * 12
        assert 1_500_000 < highest <= 3_000_000
        assert (system.unread, system.ended("done")) == (0, 12)


# the minimum rate


async def test_a_stalled_connection_is_cut(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as system:
        generation = system.ask()
        await anext(aiter(generation))
        began = trio.current_time()
        with trio.fail_after(WATCHDOG_S), generation.stream.delivering() as scope:
            await trio.sleep_forever()
        assert scope.cancelled_caught
        assert 10 <= trio.current_time() - began < 12
        assert system.unread == 0
        for _ in range(2):
            with pytest.raises(SlowConsumer) as caught:
                await read(generation)
        assert (caught.value.limit, caught.value.bound) == ("read_bytes_s", 16384)
        with pytest.raises(SlowConsumer), generation.stream.delivering():
            raise AssertionError("the request is over")


async def test_a_connection_that_stalls_once_nothing_more_arrives_is_cut(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as system:
        generation = system.ask()
        await anext(aiter(generation))
        await system.until_paused()
        with trio.fail_after(WATCHDOG_S), generation.stream.delivering() as scope:
            await trio.sleep_forever()
        assert scope.cancelled_caught
        with pytest.raises(SlowConsumer):
            await read(generation)


async def test_an_abort_lets_the_connection_take_what_is_being_sent(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as system:
        generation = system.ask()
        await anext(aiter(generation))
        with generation.stream.delivering() as scope:
            generation.abort()
            await trio.sleep(1)
        assert not scope.cancel_called
        assert system.unread == 0


async def pass_on(generation: Generation, pace_s: float) -> int:
    """Read at one piece each ``pace_s``, as a connection does. Return the number of pieces."""
    sent = 0
    async for _ in generation:
        with generation.stream.delivering():
            await trio.sleep(pace_s)
        sent += 1
    return sent


async def test_a_connection_below_the_minimum_rate_is_cut(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as system:
        with pytest.raises(SlowConsumer) as caught:
            await pass_on(system.ask(), 4.0)
        assert 0 < caught.value.read_bytes_s < 4096
        assert system.unread == 0


async def test_a_connection_above_the_minimum_rate_is_not_cut(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as system:
        assert await pass_on(system.ask(), 1.0) == PIECES
        assert system.ended("done") == 1


async def test_a_library_caller_has_no_minimum_rate(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as system:
        outputs = []
        async for output in system.ask(whole=None):
            outputs.append(output)
            await trio.sleep(5)
        assert numbers(outputs) == list(range(PIECES))


async def test_a_slow_engine_does_not_make_a_connection_too_slow(autojump_clock: MockClock) -> None:
    """The minimum rate counts while output waits for the connection, not while the connection waits for output."""
    async with open_simulated_system() as system:
        system.spawner.living[LAST].stop_process()
        generation = system.ask()
        await trio.sleep(20)
        system.spawner.living[LAST].continue_process()
        async for _ in generation:
            with generation.stream.delivering():
                await trio.sleep(0.1)
        assert system.ended("done") == 1
