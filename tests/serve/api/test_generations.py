"""Several generations that one response relays: what reading them costs, and that none waits for its own output."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import trio

from omni_actors.errors import Aborted, InvalidRequest, Overloaded
from omni_actors.generation import Generation
from omni_actors.serve.access.admission import AdmissionControl
from omni_actors.serve.api.generations import Generations
from omni_actors.serve.api.schemas import CompletionRequest
from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.routes.common import begin_choices
from omni_actors.system import OmniSystem
from tests.support.echo_systems import WATCHDOG_S, until

OUTPUTS = 20


class SpawnedTasks(trio.abc.Instrument):
    """Counts the tasks that begin."""

    count = 0

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


@pytest.fixture
async def omni() -> AsyncIterator[OmniSystem]:
    """Each output is larger than what a stream may have unread."""
    large = {"stages.first.options": {"fan_out": OUTPUTS, "payload_bytes": 5000}, "limits.window_bytes": 1000}
    async with OmniSystem.open("echo", overrides=large) as omni:
        yield omni


async def read(generations: Generations) -> Counter[int]:
    """Return how many outputs with text each generation has."""
    with trio.fail_after(WATCHDOG_S):
        return Counter([index async for index, output in generations.outputs() if output.delta])


@pytest.mark.parametrize("whole", [True, False])
async def test_reading_many_generations_starts_no_task(omni: OmniSystem, whole: bool) -> None:
    """A task for each generation and output would make the cost quadratic: 64 choices kept the event loop busy.

    Each output of a stream pauses its generation until the connection has accepted it. Here the next output that is
    asked for, most often that of another generation, tells so.
    """
    generations = Generations([omni.generate("hello") for _ in range(16)])
    generations.stream.relay(whole=whole)
    spawned = SpawnedTasks()
    trio.lowlevel.add_instrument(spawned)
    found = await read(generations)
    trio.lowlevel.remove_instrument(spawned)
    assert found == dict.fromkeys(range(16), OUTPUTS)
    assert spawned.count < OUTPUTS


class Turns(trio.abc.Instrument):
    """Counts the steps of tasks."""

    count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


async def test_each_request_is_submitted_in_a_step_of_its_own(omni: OmniSystem) -> None:
    """Each submission reads the whole conversation: 60 in one step held the event loop for a third of a second."""
    turns, steps = Turns(), list[int]()

    def submit() -> Generation:
        steps.append(turns.count)
        return omni.generate("hello")

    trio.lowlevel.add_instrument(turns)
    generations = await Generations.begin([submit] * 8)
    trio.lowlevel.remove_instrument(turns)
    generations.abort()
    assert len(set(steps)) == 8


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_no_request_stays_if_not_all_are_submitted(omni: OmniSystem, is_cancelled: bool) -> None:
    begun: list[Generation] = []
    leaving = trio.CancelScope()

    def submit() -> Generation:
        if len(begun) == 2:
            raise InvalidRequest("refused")
        begun.append(omni.generate("hello"))
        if is_cancelled and len(begun) == 2:
            leaving.cancel()
        return begun[-1]

    with leaving, suppress(InvalidRequest):
        await Generations.begin([submit] * 4)
    assert leaving.cancelled_caught == is_cancelled
    for generation in begun:
        with pytest.raises(Aborted):
            await generation.collect()


async def test_whole_answers_stay_charged_until_they_are_sent(omni: OmniSystem) -> None:
    generations = Generations([omni.generate("hello") for _ in range(2)])
    generations.stream.relay(whole=True)
    await read(generations)
    assert generations.stream.undelivered_bytes > 2 * OUTPUTS * 5000
    generations.abort()


@pytest.mark.parametrize("free", [0, 1])
async def test_choices_take_their_places_together(free: int) -> None:
    """Requests that arrive between two submissions take no place of the later ones."""
    limits = {"limits.max_requests": 6 + free}
    async with OmniSystem.open("echo", overrides=limits) as omni, trio.open_nursery() as nursery:
        admission = AdmissionControl(omni, max_bytes=1000, max_request_bytes=1000)
        begun: dict[int, Generations] = {}
        refused: list[int] = []

        def submit(**more: Any) -> Generation:
            if not omni.in_flight:  # the first submission of all
                for number, choices in enumerate([1, 1, 2], 1):
                    nursery.start_soon(ask, number, choices)
            return omni.generate("hello", **more)

        async def begin(number: int, choices: int) -> Generations:
            body = CompletionRequest(model="echo", prompt="hello", n=choices)
            ticket = admission.admit()
            try:
                ticket.take_place()
                return await begin_choices(ticket, omni, body, [submit], f"cmpl-{number}")
            finally:
                ticket.release()

        async def ask(number: int, choices: int) -> None:
            try:
                begun[number] = await begin(number, choices)
            except HTTPError:
                refused.append(number)

        await ask(0, 6)
        await until(lambda: len(begun) + len(refused) == 4)
        assert begun[0].count == 6
        assert len(begun) == 1 + free
        assert admission.places[omni] == 0
        assert not admission.tickets
        for generations in begun.values():
            generations.abort()


async def test_a_request_keeps_the_place_that_it_has() -> None:
    """Requests that come without a ticket, such as those of sessions, may take others meanwhile."""
    async with OmniSystem.open("echo", overrides={"limits.max_requests": 2}) as omni:
        admission = AdmissionControl(omni, max_bytes=1000, max_request_bytes=1000)
        tickets = [admission.admit() for _ in range(2)]
        for ticket in tickets:
            ticket.take_place()
        other = omni.generate("hello")
        body = CompletionRequest(model="echo", prompt="hello")
        begun = await begin_choices(tickets[0], omni, body, [partial(omni.generate, "hello")], "cmpl-1")
        with pytest.raises(Overloaded):
            await begin_choices(tickets[1], omni, body, [partial(omni.generate, "hello")], "cmpl-2")
        assert admission.places[omni] == 0
        begun.abort()
        other.abort()


async def test_a_wrong_request_is_refused_before_it_takes_more_places() -> None:
    async with OmniSystem.open("echo", overrides={"limits.max_requests": 2}) as omni:
        admission = AdmissionControl(omni, max_bytes=1000, max_request_bytes=1000)
        ticket = admission.admit()
        ticket.take_place()
        other = omni.generate("hello")
        body = CompletionRequest(model="echo", prompt="hello", n=2)
        with pytest.raises(InvalidRequest):
            await begin_choices(ticket, omni, body, [partial(omni.generate, "hello", colour="red")], "cmpl-1")
        other.abort()
