"""Requests that crash their workers, over real processes: other requests complete, and a resend is refused."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from omni_actors import OmniSystem
from omni_actors.config import Limits, Pipeline, Restart, Stage
from omni_actors.errors import OmniError, Quarantined, StageCrashed, StageUnavailable
from omni_actors.generation import Generation
from omni_actors.orchestrator import trials
from omni_actors.orchestrator.pieces import Input
from omni_actors.outputs import Output
from omni_actors.protocol.messages import Address
from omni_actors.system import Health
from tests.support.echo_systems import read
from tests.support.shared_system import SharedSystem, open_shared_system, with_shared_system

WATCHDOG_S = 60.0
PIECES = 8


def pipeline(intensity: int, **limits: Any) -> Pipeline:
    quick = Restart(intensity=intensity, backoff_s=0.01, backoff_max_s=0.01, retry_s=0)
    stages = {
        "first": Stage(engine="echo", accepts=("script",), emits="text", restart=quick),
        "second": Stage(engine="echo", inputs=("first",), emits="audio", options={"step_s": 0.01}, restart=quick),
    }
    return Pipeline(name="poison", stages=stages, limits=Limits(**limits))


@pytest.fixture(autouse=True)
def _patient_probation(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a suspect is not cleared before its worker has computed what crashes it."""
    monkeypatch.setattr(trials, "PROBATION_S", 30.0)


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int]) -> Iterator[SharedSystem]:
    with open_shared_system(lambda: OmniSystem.open(pipeline(1000)), fixture_processes) as shared_system:
        yield shared_system


def innocent(omni: OmniSystem, number: int) -> Generation:
    return omni.submit({"script": [Input({"n": number, "piece": piece}) for piece in range(PIECES)]}, ["audio"])


def poison(omni: OmniSystem, **how: Any) -> Generation:
    """Submit a request that ends the worker of the second stage while it works on other requests."""
    pieces = [Input({"piece": piece}) for piece in range(3)]
    return omni.submit({"script": [*pieces, Input({"echo": {"stage": "second", **how}})]}, ["audio"])


async def together(*generations: Generation) -> list[list[Output] | OmniError]:
    """Return the outputs of each generation, or the error that ended it."""
    results: list[list[Output] | OmniError] = [[] for _ in generations]

    async def one(place: int) -> None:
        try:
            results[place] = await read(generations[place])
        except OmniError as error:
            results[place] = error

    async with trio.open_nursery() as nursery:
        for place in range(len(generations)):
            nursery.start_soon(one, place)
    return results


def assert_no_load(omni: OmniSystem) -> None:
    """No replica counts requests that have all ended."""
    loads = {
        f"{stage}.{each.replica}": omni._orchestrator.pools.loads[Address(stage, each.replica)]
        for stage, replicas in omni.health().stages.items()
        for each in replicas
    }
    assert set(loads.values()) == {0}, loads


def check_innocent(number: int, outputs: list[Output] | OmniError) -> Output:
    assert isinstance(outputs, list), outputs
    assert [(output.data["n"], output.data["piece"]) for output in outputs] == [(number, i) for i in range(PIECES)]
    return outputs[-1]


@pytest.mark.parametrize(
    "how", [*(pytest.param({"raise": where}, marks=pytest.mark.slow) for where in ("feed", "step")), {"exit": 3}]
)
def test_poison_fails_and_the_five_requests_beside_it_complete(
    shared_system: SharedSystem, how: dict[str, Any]
) -> None:
    async def work(omni: OmniSystem) -> None:
        before = omni.health().stages["second"][0].generation
        others = [innocent(omni, number) for number in range(5)]
        crash, *answers = await together(poison(omni, **how), *others)
        assert isinstance(crash, StageCrashed)
        assert "(limits.replays)" in (crash.not_replayed or "")
        assert not crash.retryable
        for number, outputs in enumerate(answers):
            final = check_innocent(number, outputs)
            assert final.metrics is not None
            assert final.metrics.replays >= 1, "it was in the worker that died"
        generation = omni.health().stages["second"][0].generation
        assert generation - before <= 4, "the culprit is found in few deaths"

    shared_system.run(work)


async def test_the_deaths_of_one_request_count_once_against_the_intensity() -> None:
    """The pipeline tolerates one counted death."""
    async with OmniSystem.open(pipeline(intensity=1)) as omni:
        crash, outputs = await together(poison(omni, exit=3), innocent(omni, 1))
        assert isinstance(crash, StageCrashed)
        check_innocent(1, outputs)
        assert [len(replicas[0].history) for replicas in omni.health().stages.values()] == [0, 3]
        check_innocent(2, await read(innocent(omni, 2)))


@with_shared_system
async def test_a_resend_is_refused_before_it_reaches_a_worker(omni: OmniSystem) -> None:
    with pytest.raises(StageCrashed):
        await read(poison(omni, exit=4))
    generation = omni.health().stages["second"][0].generation
    with pytest.raises(Quarantined, match="'second'") as caught:
        poison(omni, exit=4)
    assert not caught.value.retryable
    assert 0 < caught.value.ends_in_s <= 600
    check_innocent(1, await read(innocent(omni, 1)))
    assert omni.health().stages["second"][0].generation <= generation + 1, "the refused request reached no worker"


@with_shared_system
async def test_requests_with_one_fingerprint_share_the_deaths_of_one(omni: OmniSystem) -> None:
    before = omni.health().stages["second"][0].generation
    alike = [poison(omni, exit=5) for _ in range(20)]
    others = [innocent(omni, number) for number in range(3)]
    results = await together(*alike, *others)
    kinds = {type(result) for result in results[:20]}
    assert kinds <= {StageCrashed, Quarantined}
    assert all(isinstance(result, OmniError) and not getattr(result, "retryable", True) for result in results[:20])
    for number, outputs in enumerate(results[20:]):
        check_innocent(number, outputs)
    assert omni.health().stages["second"][0].generation - before <= 3
    assert_no_load(omni)


@with_shared_system
async def test_a_request_whose_workers_were_killed_is_not_quarantined(omni: OmniSystem) -> None:
    """The kills use up its replays, but they do not show that the request caused the deaths."""
    hanging = poison(omni, hang=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kill_thrice, omni)
        with pytest.raises(StageCrashed, match="SIGKILL") as caught:
            await read(hanging)
    assert not caught.value.retryable
    while not omni.health().ready:
        await omni.wait_changed()
    poison(omni, hang=True).abort()


async def kill_thrice(omni: OmniSystem) -> None:
    killed: set[int | None] = {None}
    while len(killed) <= 3:
        [replica] = omni.health().stages["second"]
        if replica.state == "ready" and replica.pid not in killed:
            assert replica.pid is not None
            killed.add(replica.pid)
            os.kill(replica.pid, signal.SIGKILL)
        if len(killed) <= 3:
            await omni.wait_changed()


@pytest.mark.slow
async def test_two_equal_requests_that_crash_their_worker_late_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both pass their probation, run beside each other, and use up their replays in the same death."""
    monkeypatch.setattr(trials, "PROBATION_S", 0.05)
    late = [Input({"piece": piece}) for piece in range(100)]
    late.append(Input({"echo": {"stage": "second", "exit": 6}}))
    async with OmniSystem.open(pipeline(1000, replays=1), **{"stages.second.step_timeout_s": 2.0}) as omni:
        results = await together(*(omni.submit({"script": late}, ["audio"]) for _ in range(2)))
        assert {type(result) for result in results} <= {StageCrashed, Quarantined}
        while not omni.health().ready:
            await omni.wait_changed()
        check_innocent(3, await read(innocent(omni, 3)))
        assert_no_load(omni)


@pytest.mark.slow
async def test_a_hanging_request_is_not_cleared_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "PROBATION_S", 0.05)
    async with OmniSystem.open(pipeline(1000), **{"stages.second.step_timeout_s": 5.0}) as omni:
        hanging, *answers = await together(poison(omni, hang=True), *(innocent(omni, number) for number in range(3)))
        assert isinstance(hanging, StageCrashed)
        assert not hanging.retryable
        for number, outputs in enumerate(answers):
            check_innocent(number, outputs)
        assert len(omni.health().stages["second"][0].history) <= 4


@pytest.mark.slow
async def test_under_steady_load_poison_is_tried_once_more_on_a_drained_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "CULPRIT_WAIT_S", 0.2)
    replays: list[int] = []

    async def ask_until(ended: trio.Event) -> None:
        while not ended.is_set():
            metrics = check_innocent(1, await read(innocent(omni, 1))).metrics
            assert metrics is not None
            replays.append(metrics.replays)

    async with OmniSystem.open(pipeline(1000)) as omni, trio.open_nursery() as nursery:
        ended = trio.Event()
        for _ in range(3):
            nursery.start_soon(ask_until, ended)
        with trio.fail_after(WATCHDOG_S):
            while not replays:  # noqa: ASYNC110 - until the clients are under way
                await trio.sleep(0.01)
        with pytest.raises(StageCrashed, match="could not be tried apart") as caught:
            await read(poison(omni, **{"raise": "feed"}))
        ended.set()
        assert not caught.value.retryable
        assert len(omni.health().stages["second"][0].history) == 2
    assert max(replays) == 1, "no innocent request was in both deaths"


async def test_a_stage_that_was_given_up_is_tried_again_at_the_time_that_health_reports() -> None:
    half_open = Restart(intensity=0, backoff_s=0.01, retry_s=1.0)
    stage = Stage(engine="echo", accepts=("script",), emits="text", restart=half_open)
    async with OmniSystem.open(Pipeline(name="one", stages={"only": stage})) as omni:
        with pytest.raises(StageUnavailable) as caught:
            await read(omni.submit({"script": [Input({"echo": {"exit": 7}})]}, ["text"]))
        assert omni.errored
        assert caught.value.retry_after_s is not None
        assert 0 < caught.value.retry_after_s < 30
        [replica] = omni.health().stages["only"]
        assert (replica.state, replica.retry_in_s is not None) == ("failed", True)
        outside = list[Health]()
        thread = threading.Thread(target=lambda: outside.append(omni.health()))  # where trio does not run
        thread.start()
        thread.join()  # nothing can change meanwhile
        assert outside[0].stages["only"][0].state == "failed"
        with pytest.raises(StageUnavailable, match="may be ready in"):
            omni.submit({"script": [Input({"n": 1})]}, ["text"])
        with trio.fail_after(WATCHDOG_S):
            while omni.health().stages["only"][0].state != "ready":
                await omni.wait_changed()
        assert (omni.errored, omni.dead_error) == (False, None)
        assert omni.health().stages["only"][0].retry_in_s is None
        assert [output.data["n"] for output in await read(omni.submit({"script": [Input({"n": 1})]}, ["text"]))] == [1]


async def test_without_retry_s_a_stage_that_was_given_up_stays_down() -> None:
    stage = Stage(engine="echo", accepts=("script",), emits="text", restart=Restart(intensity=0, retry_s=0))
    async with OmniSystem.open(Pipeline(name="one", stages={"only": stage})) as omni:
        with pytest.raises(StageUnavailable) as caught:
            await read(omni.submit({"script": [Input({"echo": {"exit": 7}})]}, ["text"]))
        assert caught.value.retry_after_s is None
        assert "tried again" not in str(caught.value)
        assert omni.health().stages["only"][0].retry_in_s is None
