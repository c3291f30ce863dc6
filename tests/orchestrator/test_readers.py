"""Clients that read slowly, or not at all: what becomes of their requests, and of the others."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from omni_actors.errors import Aborted, DeadlineExceeded, Overloaded, SlowConsumer
from omni_actors.generation import Generation
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


async def test_a_request_that_is_not_read_is_paused_and_goes_on_where_it_was(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as world:
        generation = world.ask()
        await world.until_paused()
        assert 100_000 < world.unread < 300_000
        before = world.unread
        await trio.sleep(100)
        assert world.unread == before
        assert len(await read(world.ask())) == PIECES, "the others go on"
        assert numbers(await read(generation)) == list(range(PIECES))
        assert world.unread == 0


async def test_an_engine_that_cannot_pause_is_bounded_by_the_request_s_own_limit(autojump_clock: MockClock) -> None:
    async with open_simulated_system(NOT_PAUSABLE, output_bytes=500_000) as world:
        generation = world.ask()
        await until(lambda: world.ended("SlowConsumer") == 1)
        assert world.unread == 0
        with pytest.raises(SlowConsumer) as caught:
            await read(generation)
        assert caught.value.limit == "output_bytes"


async def test_a_stage_that_starts_a_paused_request_again_is_paused_too(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as world:
        generation = world.ask()
        await world.until_paused()
        before = world.unread
        world.spawner.living[LAST].kill()
        await until(lambda: world.omni.health().stages["second"][0].restarts == 1 and world.omni.health().ready)
        engine = world.spawner.living[LAST].engine
        assert engine is not None
        await trio.sleep(100)
        assert not engine.busy
        assert world.unread == before
        outputs = await read(generation)
        assert numbers(outputs) == list(range(PIECES))
        assert outputs[-1].metrics is not None
        assert outputs[-1].metrics.replays == 1


async def test_a_caller_that_reads_one_answer_after_the_other_is_not_paused(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as world:
        generations = [world.ask(whole=None) for _ in range(4)]
        await until(lambda: world.unread > 4 * PIECE * PIECES)
        assert world.gauge("requests_paused") == 0
        for generation in reversed(generations):
            assert len(await read(generation)) == PIECES


# the bounds


async def test_a_complete_answer_that_is_not_read_takes_a_place_until_it_is(autojump_clock: MockClock) -> None:
    async with open_simulated_system(max_requests=1, window_bytes=10_000_000) as world:
        generation = world.ask()
        await until(lambda: world.gauge("requests_in_flight") == 1 and world.unread > PIECE * PIECES)
        await trio.sleep(1)
        assert world.omni.in_flight == 1
        with pytest.raises(Overloaded):
            world.ask()
        assert world.ended("done") == 0
        await read(generation)
        assert (world.omni.in_flight, world.ended("done")) == (0, 1)


async def test_a_complete_answer_that_is_small_takes_no_place(autojump_clock: MockClock) -> None:
    async with open_simulated_system(max_requests=1) as world:
        generation = world.ask(pieces=2)
        await until(lambda: world.omni.in_flight == 0)
        assert len(await read(world.ask(pieces=2))) == 2
        assert world.unread > 0
        assert len(await read(generation)) == 2
        assert world.unread == 0


async def test_the_deadline_counts_until_everything_is_read(autojump_clock: MockClock) -> None:
    async with open_simulated_system(window_bytes=10_000_000) as world:
        generation = world.ask(deadline_s=50)
        await until(lambda: world.unread > PIECE * PIECES)
        await trio.sleep(40)
        assert (await anext(aiter(generation))).data["n"] == 0
        await trio.sleep(15)
        assert (world.unread, world.omni.in_flight, world.ended("DeadlineExceeded")) == (0, 0, 1)
        with pytest.raises(DeadlineExceeded):
            await read(generation)


@pytest.mark.parametrize("how", ["abort", "by name", "drop"])
async def test_an_abort_frees_what_is_complete_and_not_read(autojump_clock: MockClock, how: str) -> None:
    async with open_simulated_system(window_bytes=10_000_000) as world:
        generation = world.ask()
        await until(lambda: world.unread > PIECE * PIECES)
        await trio.sleep(1)
        if how == "drop":
            del generation
        else:
            generation.abort() if how == "abort" else world.omni.abort(generation.request_id)
            with pytest.raises(Aborted):
                await read(generation)
        await until(lambda: world.unread == 0)
        assert world.ended("Aborted") == 1


async def test_a_full_system_ends_the_slowest_reader_for_a_newcomer_and_not_at_once(autojump_clock: MockClock) -> None:
    async with open_simulated_system(max_requests=3) as world:
        slow = [world.ask() for _ in range(3)]
        await until(lambda: world.gauge("requests_paused") == 3)
        with pytest.raises(Overloaded):
            world.ask()
        await trio.sleep(2)
        for generation in (slow[0], slow[2]) * 2:  # the second piece gives the first one back
            await anext(aiter(generation))
        assert len(await read(world.ask())) == PIECES
        with pytest.raises(SlowConsumer) as caught:
            await read(slow[1])
        assert (caught.value.limit, caught.value.bound, caught.value.read_bytes_s) == ("max_requests", 3, 0)
        assert caught.value.waited_s > 2
        for generation in (slow[0], slow[2]):
            assert len(await read(generation)) == PIECES - 2


async def test_the_total_is_bounded_where_nothing_can_be_paused(autojump_clock: MockClock) -> None:
    async with open_simulated_system(NOT_PAUSABLE, unread_bytes=1_500_000) as world:
        generations = [world.ask() for _ in range(4)]
        highest = 0.0
        for _ in range(1000):
            await trio.sleep(0.001)
            highest = max(highest, world.unread)
        assert 1_000_000 < highest <= 1_500_000
        assert world.ended("SlowConsumer") == 3
        outcomes = []
        for generation in generations:
            try:
                outcomes.append(len(await read(generation)))
            except SlowConsumer as error:
                outcomes.append(error.limit)
        assert sorted(outcomes, key=str) == [PIECES, *["unread_bytes"] * 3]


async def test_whole_answers_complete_one_after_the_other_when_memory_is_short(autojump_clock: MockClock) -> None:
    """Together they are four times the bound. Each is collected, which gives nothing back before the end."""
    async with open_simulated_system(unread_bytes=3_000_000) as world:
        done, highest = [], 0.0

        async def collect() -> None:
            generation = world.ask(whole=True)
            done.append(len(await read(generation)))
            nonlocal highest
            highest = max(highest, world.unread)
            generation.abort()

        with trio.fail_after(WATCHDOG_S):
            async with trio.open_nursery() as nursery:
                for _ in range(12):
                    nursery.start_soon(collect)
        assert done == [PIECES] * 12
        assert 1_500_000 < highest <= 3_000_000
        assert (world.unread, world.ended("done")) == (0, 12)


# the least rate


async def test_a_connection_that_takes_nothing_is_cut(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as world:
        generation = world.ask()
        await anext(aiter(generation))
        began = trio.current_time()
        with trio.fail_after(WATCHDOG_S), generation.delivering() as scope:
            await trio.sleep_forever()
        assert scope.cancelled_caught
        assert 10 <= trio.current_time() - began < 12
        assert world.unread == 0
        for _ in range(2):
            with pytest.raises(SlowConsumer) as caught:
                await read(generation)
        assert (caught.value.limit, caught.value.bound) == ("read_bytes_s", 16384)
        with pytest.raises(SlowConsumer), generation.delivering():
            raise AssertionError("it is over")


async def pass_on(generation: Generation, pace_s: float) -> int:
    """Read as a connection that takes a piece each ``pace_s``; how many it got. ``PIECE`` bytes are 2.5 s' worth."""
    sent = 0
    async for _ in generation:
        with generation.delivering():
            await trio.sleep(pace_s)
        sent += 1
    return sent


async def test_a_connection_is_cut_below_the_least_rate(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as world:
        with pytest.raises(SlowConsumer) as caught:
            await pass_on(world.ask(), 4.0)
        assert 0 < caught.value.read_bytes_s < 4096
        assert world.unread == 0


async def test_a_connection_is_not_cut_above_the_least_rate(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as world:
        assert await pass_on(world.ask(), 1.0) == PIECES
        assert world.ended("done") == 1


async def test_a_caller_that_computes_between_two_pieces_is_left_alone(autojump_clock: MockClock) -> None:
    async with open_simulated_system() as world:
        outputs = []
        async for output in world.ask(whole=None):
            outputs.append(output)
            await trio.sleep(5)
        assert numbers(outputs) == list(range(PIECES))


async def test_a_connection_that_is_fast_enough_is_not_blamed_for_a_slow_engine(autojump_clock: MockClock) -> None:
    """The least rate counts while output waits for the connection, not while the connection waits for output."""
    async with open_simulated_system() as world:
        world.spawner.living[LAST].stop_process()
        generation = world.ask()
        await trio.sleep(20)
        world.spawner.living[LAST].continue_process()
        async for _ in generation:
            with generation.delivering():
                await trio.sleep(0.1)
        assert world.ended("done") == 1
