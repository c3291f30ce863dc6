"""A profile: the hops of requests and torch's own events, in one file on one time axis."""

from __future__ import annotations

import json
import math
import os
import signal
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
import trio.testing

from omni_actors import OmniSystem
from omni_actors.errors import InvalidRequest, Unsupported
from omni_actors.stages.base import StageFailure, StageOutput
from omni_actors.stages.echo.engine import EchoEngine
from omni_actors.system.profiling import Profile
from omni_actors.worker.profiler import WorkerProfiler
from tests.support.echo_systems import pid_of, read, wait_restarted, words_until
from tests.support.scaled_system import numbers, opened

CLOCKS_US = 20_000.0
"""How far torch's conversion of its clock may be from the kernel's wall clock; one step takes longer."""


class Multiplying(EchoEngine):
    """Computes with torch in each step. Workers import it by name."""

    def step(self) -> Iterable[StageOutput | StageFailure]:
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))
        yield from super().step()


OPTIONS: dict[str, Any] = {
    "stages.first.engine": "tests.test_profiling:Multiplying",
    "stages.first.options": {"fan_out": 4, "step_s": 0.05},
    "stages.first.deterministic": True,
    "stages.first.restart.backoff_s": 0.01,
}


@pytest.mark.slow
async def test_one_file_has_the_hops_and_what_the_engines_computed(tmp_path: Path) -> None:
    async with OmniSystem.open("echo", overrides=OPTIONS) as omni:
        with pytest.raises(InvalidRequest, match="no profile runs"):
            await omni.stop_profile(tmp_path / "no.json")
        started = await omni.start_profile()
        assert started["first"][0].error is None
        assert isinstance(started["second"][0].error, Unsupported)
        with pytest.raises(InvalidRequest, match="runs already"):
            await omni.start_profile()
        for name in ("one", "two"):
            await read(omni.generate("hello", modalities=("text", "audio"), request_id=name))
        with pytest.raises(FileNotFoundError):
            await omni.stop_profile(tmp_path / "nowhere" / "profile.json")
        profile = await omni.stop_profile(tmp_path / "profile.json")
        assert profile.requests == 2
        assert list(profile.replies) == ["first"]
        assert os.listdir(tmp_path) == ["profile.json"]
        check_file(events_of(profile), pid_of(omni, "first"))
        await check_a_death(omni, tmp_path / "death.json")


def events_of(profile: Profile) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(profile.path.read_text())["traceEvents"]
    return events


def check_file(events: list[dict[str, Any]], worker: int) -> None:
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names[worker] == "first.0"
    assert names[os.getpid()] == "requests"
    tracks = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert {"one", "one: stage first", "one: stage second", "two"} <= tracks.keys()
    check_nesting(events)
    products = [event for event in events if event["name"] == "aten::mm"]
    assert len(products) >= 8
    assert {event["pid"] for event in products} == {worker}
    computing = [
        (event["ts"] - CLOCKS_US, event["ts"] + event["dur"] + CLOCKS_US)
        for event in events
        if event["name"] == "compute" and event["tid"] in (tracks["one: stage first"], tracks["two: stage first"])
    ]
    assert len(computing) == 2
    for product in products:
        assert any(began <= product["ts"] and product["ts"] + product["dur"] <= ended for began, ended in computing)


def check_nesting(events: list[dict[str, Any]]) -> None:
    """The periods of a track lie within each other or follow each other, as the format demands."""
    by_track = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["pid"] == os.getpid():
            by_track[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert by_track
    for periods in by_track.values():
        open_until: list[float] = []
        for began, ended in sorted(periods, key=lambda period: (period[0], -period[1])):
            while open_until and open_until[-1] <= began + 0.01:
                open_until.pop()
            assert began <= ended
            assert not open_until or ended <= open_until[-1] + 0.01
            open_until.append(ended)


async def check_a_death(omni: OmniSystem, path: Path) -> None:
    """The worker's part is lost; the file has the death and the resume."""
    await omni.start_profile(("first",))
    killed = trio.Event()
    generation = omni.generate(script=words_until(killed, "hello ", "again"), modalities=("text",))
    await generation.__anext__()
    os.kill(pid_of(omni, "first"), signal.SIGKILL)
    killed.set()
    await read(generation)
    await wait_restarted(omni, "first", 2)
    profile = await omni.stop_profile(path)
    error = profile.replies["first"][0].error
    assert isinstance(error, InvalidRequest)
    assert error.code == "no_profile"
    events = events_of(profile)
    check_nesting(events)
    assert {"worker_died", "resume first"} <= {event["name"] for event in events}


async def test_a_call_with_a_wrong_time_limit_neither_starts_nor_stops_a_profile() -> None:
    async with OmniSystem.open("echo") as omni:
        with pytest.raises(InvalidRequest, match="timeout_s"):
            await omni.start_profile(timeout_s=math.nan)
        await omni.start_profile()
        with pytest.raises(InvalidRequest, match="timeout_s"):
            await omni.stop_profile("unused", timeout_s=math.nan)
        with pytest.raises(InvalidRequest, match="runs already"):
            await omni.start_profile()


async def test_of_two_calls_that_stop_a_profile_one_is_refused(tmp_path: Path) -> None:
    async with OmniSystem.open("echo") as omni:
        await omni.start_profile()
        outcomes: list[object] = []

        async def stop(path: Path) -> None:
            try:
                outcomes.append((await omni.stop_profile(path)).path)
            except InvalidRequest as error:
                outcomes.append(error.code)

        async with trio.open_nursery() as nursery:
            for name in ("one", "two"):
                nursery.start_soon(stop, tmp_path / name)
        assert "no_profile" in outcomes
        assert len(os.listdir(tmp_path)) == 1


async def test_a_worker_has_the_number_of_its_replica_after_another_was_removed(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop(_: WorkerProfiler, folder: str) -> dict[str, Any]:
        file = Path(folder, "1.json")
        file.write_text('{"traceEvents": []}')
        return {"file": str(file), "pid": 1}

    monkeypatch.setattr(WorkerProfiler, "start", lambda _: None)
    monkeypatch.setattr(WorkerProfiler, "stop", stop)
    async with opened(replicas=2) as scaling:
        short, long = scaling.ask(1), scaling.ask(1000)
        assert await numbers(short) == [0]
        await scaling.omni.scale("second", 1)
        assert scaling.states == {1: "ready"}, "the other one was idle"
        await scaling.omni.start_profile(("second",))
        profile = await scaling.omni.stop_profile(tmp_path / "profile.json")
        assert [reply.result() for reply in profile.replies["second"]] == [{"pid": 1}]
        names = [event["args"]["name"] for event in events_of(profile) if event["name"] == "process_name"]
        assert names == ["requests", "second.1"]
        long.abort()
