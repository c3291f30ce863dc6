"""A worker that breaks the protocol is killed; the system lives on and replays the worker's requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
import trio.testing

from omni_actors.errors import StageCrashed
from omni_actors.protocol import chunks
from omni_actors.protocol.chunks import ChunkHeader
from omni_actors.protocol.messages import (
    Address,
    ControlMessage,
    Finished,
    InputComplete,
    LoadFailed,
    StageStats,
    Started,
)
from tests.support.simulated_system import PIECES, SimulatedSystem, numbers, open_simulated_system, read, until

encode, replaced = chunks.encode, msgspec.structs.replace
STATS = StageStats(stage="", started=0.0, finished=0.0, step_s=0.0, chunks=0, sent_bytes={})


def restarts(system: SimulatedSystem, stage: str) -> int:
    return system.omni.health().stages[stage][0].restarts


def exits(system: SimulatedSystem, stage: str) -> str:
    return str(system.omni.health().stages[stage][0].last_exit)


@pytest.mark.parametrize(
    ("stage", "notices"),
    [
        ("second", [Started(1)]),
        ("first", [Finished(1, STATS), Finished(1, STATS)]),
        ("first", [Finished(1, STATS), InputComplete(1, "client")]),
        ("second", [Finished(1, STATS), Finished(1, STATS)]),
    ],
)
async def test_a_notice_that_does_not_fit_ends_its_worker_only(
    stage: str, notices: list[ControlMessage], autojump_clock: trio.testing.MockClock
) -> None:
    other = {"first": "second", "second": "first"}[stage]
    async with open_simulated_system() as system:
        generation = system.ask()
        await until(lambda: system.unread > 0)
        for notice in notices:
            system.spawner.living[Address(stage, 0)].notify(notice)
        assert numbers(await read(generation)) == list(range(PIECES))
        await until(lambda: restarts(system, stage) == 1)
        told = rf"protocol error: {type(notices[-1]).__name__} for request 1, which is \w+ in stage '{stage}'"
        assert re.search(told, exits(system, stage))
        assert restarts(system, other) == 0
        assert numbers(await read(system.ask())) == list(range(PIECES))


@pytest.mark.parametrize("part", [-1, 0, 7])
async def test_a_part_of_the_desired_state_that_is_not_there_is_taken_for_none(
    part: int, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_simulated_system() as system:
        system.spawner.living[Address("first", 0)].notify(LoadFailed("there is no memory", part))
        assert numbers(await read(system.ask())) == list(range(PIECES))


@pytest.mark.parametrize(
    ("corrupt", "reason"),
    [
        (lambda buffers, header, tensors: [memoryview(b"noise")], "BundleCorrupted"),
        (lambda buffers, header, tensors: encode(replaced(header, source="nowhere"), tensors), "names the stage"),
        (lambda buffers, header, tensors: encode(replaced(header, seq=header.seq + 7), tensors), "expected chunk 5"),
        (lambda buffers, header, tensors: encode(replaced(header, seq=-9), tensors), "received chunk -9"),
        (lambda buffers, header, tensors: encode(replaced(header, request=99), tensors), "received chunk 6"),
        (lambda buffers, header, tensors: encode(replaced(header, seq=2, data={"n": 7}), tensors), "differs between"),
    ],
)
async def test_an_output_chunk_that_is_invalid_ends_its_worker_only(
    corrupt: Callable[..., list[memoryview]],
    reason: str,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corrupted: list[ChunkHeader] = []

    def encode_one_wrongly(header: ChunkHeader, tensors: Mapping[str, Any], **options: Any) -> list[Any]:
        buffers = encode(header, tensors, **options)
        if header.source != "second" or header.seq != 5 or corrupted:
            return buffers
        corrupted.append(header)
        return corrupt(buffers, header, tensors)

    monkeypatch.setattr(chunks, "encode", encode_one_wrongly)
    async with open_simulated_system() as system:
        assert numbers(await read(system.ask())) == list(range(PIECES))
        assert corrupted
        assert reason in exits(system, "second")
        assert (restarts(system, "first"), restarts(system, "second")) == (0, 1)


async def test_a_replay_that_differs_ends_its_request_only(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    died = False

    def encode_another_replay(header: ChunkHeader, tensors: Mapping[str, Any], **options: Any) -> list[Any]:
        nonlocal died
        if header.source == "second" and header.request == 1:
            if not died and header.seq == 5:
                died = True
                return [memoryview(b"noise")]
            if died and header.seq == 2:
                header = replaced(header, data={"n": 7})
        return encode(header, tensors, **options)

    monkeypatch.setattr(chunks, "encode", encode_another_replay)
    async with open_simulated_system() as system:
        with pytest.raises(StageCrashed, match="chunk 2 of stage 'second' differs between"):
            await read(system.ask())
        assert numbers(await read(system.ask())) == list(range(PIECES))
        assert (restarts(system, "first"), restarts(system, "second")) == (0, 1)
