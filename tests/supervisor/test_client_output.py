"""Lack of memory in the parent for the output of one worker ends that worker only. Workers and time are simulated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from omni_actors.errors import SystemClosed
from omni_actors.orchestrator import worker_events
from omni_actors.orchestrator.pieces import Piece
from omni_actors.protocol.messages import Address
from omni_actors.supervisor import client_output
from ringbuf import Consumer, Frame
from tests.support.simulated_system import PIECES, SimulatedSystem, numbers, open_simulated_system, read

SECOND = Address("second", 0)
NO_MEMORY = (4, 5)
"""For which outputs there is none. Both are of one step, in which the worker answers two requests. The first one ends
the worker, and the second one is left in its ring."""


def let_copies_fail(system: SimulatedSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = itertools.count()

    def copied(data: memoryview) -> bytearray:
        if next(copies) in NO_MEMORY:
            raise MemoryError
        return bytearray(data)

    monkeypatch.setattr(client_output, "bytearray", copied, raising=False)


def let_receiving_fail(system: SimulatedSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, try_recv = itertools.count(), Consumer.try_recv
    output = system.omni._supervisor.replicas[SECOND].incarnation.output

    def received(self: Consumer) -> Frame | None:
        if self is output and next(calls) in NO_MEMORY:
            raise MemoryError("Unable to allocate 2.00 GiB")
        return try_recv(self)

    monkeypatch.setattr(Consumer, "try_recv", received)


@pytest.mark.parametrize("let_fail", [let_copies_fail, let_receiving_fail])
async def test_an_output_without_memory_ends_its_worker_only_and_is_replayed(
    let_fail: Callable[[SimulatedSystem, pytest.MonkeyPatch], None],
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_simulated_system() as system:
        let_fail(system, monkeypatch)

        async def ask() -> None:
            assert numbers(await read(system.ask())) == list(range(PIECES))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(ask)
        stages = system.omni.health().stages
        assert (stages["first"][0].restarts, stages["second"][0].restarts) == (0, 1)
        assert "MemoryError: there is no memory for its output" in str(stages["second"][0].last_exit)


async def test_lack_of_memory_for_a_received_output_is_loud(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk counts as received: a replay of the worker's requests would lose it."""
    pieces = itertools.count()

    def piece(**fields: Any) -> Piece:
        if next(pieces) == NO_MEMORY[0]:
            raise MemoryError
        return Piece(**fields)

    monkeypatch.setattr(worker_events, "Piece", piece)
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="no memory to process"), flatten_subgroups=True):
        async with open_simulated_system() as system:
            with pytest.raises(SystemClosed):
                await read(system.ask())
