"""Order, joins, bounds, deadlines and aborts of requests, with real workers."""

from __future__ import annotations

import os
import random
import signal
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from omni_actors.config import Pipeline, Restart, Stage
from omni_actors.errors import Aborted, DeadlineExceeded, InvalidRequest, Overloaded, SlowConsumer
from omni_actors.generation import Generation, Output
from omni_actors.orchestrator.pieces import Input
from omni_actors.system import OmniSystem
from tests.support.shared_system import SharedSystem, open_shared_system, with_shared_system

WATCHDOG_S = 60.0
MAX_REQUESTS = 3
CENSUS = """
    from collections import deque
    from omni_actors.stages.base import StageOutput

    class Census:
        '''Answers with the number of other requests that it holds. A request with ``hold`` gets no answer.'''

        def __init__(self, context):
            self.stage, self.held, self.answers = context.stage, set(), deque()

        @property
        def busy(self):
            return bool(self.answers)

        def start(self, request):
            self.held.add(request.request_id)

        def feed(self, request_id, chunk):
            if chunk.last and chunk.data.get("hold") != self.stage:
                self.answers.append((request_id, chunk.data))

        def abort(self, request_id):
            self.held.discard(request_id)
            self.answers = deque(each for each in self.answers if each[0] != request_id)

        def step(self):
            while self.answers:
                request_id, data = self.answers.popleft()
                self.held.remove(request_id)
                census = {**data.get("census", {}), self.stage: len(self.held)}
                yield StageOutput(request_id, {}, {**data, "census": census}, last=True)

        def close(self):
            pass
"""


ONE = Pipeline(name="one", stages={"only": Stage(engine="echo", accepts=("script",), emits="audio")})


@pytest.fixture(scope="module")
def census(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    path = tmp_path_factory.mktemp("census")
    (path / "census_engine.py").write_text(textwrap.dedent(CENSUS))
    engine, quick = "census_engine:Census", Restart(intensity=1000, backoff_s=0.01, backoff_max_s=0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        yield Pipeline(
            name="census",
            stages={
                "top": Stage(engine=engine, accepts=("script",), emits="text", restart=quick),
                "bottom": Stage(engine=engine, inputs=("top",), emits="audio", restart=quick),
            },
        )


@pytest.fixture
def alone(census: Pipeline) -> Pipeline:
    """A pipeline of the first stage alone."""
    return Pipeline(name="alone", stages={"top": census.stages["top"]})


@pytest.fixture(scope="module")
def shared_system(census: Pipeline, fixture_processes: set[int]) -> Iterator[SharedSystem]:
    with open_shared_system(
        lambda: OmniSystem.open(census, **{"limits.max_requests": MAX_REQUESTS}), fixture_processes
    ) as shared_system:
        yield shared_system


@pytest.fixture(scope="module")
def echo(fixture_processes: set[int]) -> Iterator[SharedSystem]:
    """The echo pipeline; the rings of the second stage are smaller than those of the first."""
    rings = {"stages.first.ring_bytes": 8192, "stages.second.ring_bytes": 4096}
    with open_shared_system(
        lambda: OmniSystem.open("echo", **rings, **{"stages.first.options.step_s": 0.001}), fixture_processes
    ) as shared_system:
        yield shared_system


def ask(omni: OmniSystem, *, modalities: tuple[str, ...] = ("audio",), **data: Any) -> Generation:
    return omni.submit({"script": [Input({"text": "x", **data})]}, modalities)


async def read(generation: Generation) -> list[Output]:
    with trio.fail_after(WATCHDOG_S):
        return [output async for output in generation]


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(WATCHDOG_S):
        while not condition():  # noqa: ASYNC110 - no event announces the condition
            await trio.sleep(0.002)


def in_flight(omni: OmniSystem) -> float:
    value = omni.metrics.registry.get_sample_value("omni_requests_in_flight")
    assert value is not None
    return value


def unread(omni: OmniSystem) -> float:
    value = omni.metrics.registry.get_sample_value("omni_unread_bytes")
    assert value is not None
    return value


def aborted(omni: OmniSystem) -> float:
    return omni.metrics.registry.get_sample_value("omni_requests_total", {"outcome": "Aborted"}) or 0.0


async def is_free_everywhere(omni: OmniSystem) -> bool:
    """Whether no engine holds a request. Aborts reach every engine before the request that asks."""
    assert in_flight(omni) == 0
    (final,) = await read(ask(omni))
    return bool(final.data["census"] == {"top": 0, "bottom": 0})


async def lose_bottom(omni: OmniSystem) -> None:
    """Kill the worker of the last stage: requests wait until it has restarted."""
    pid = omni.health().stages["bottom"][0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: omni.health().stages["bottom"][0].state != "ready")


# Aborts, deadlines, dropped streams


@with_shared_system
async def test_abort_of_a_queued_request(omni: OmniSystem) -> None:
    await lose_bottom(omni)
    queued = ask(omni)
    assert omni.metrics.registry.get_sample_value("omni_requests_queued") == 1
    queued.abort()
    with pytest.raises(Aborted):
        await read(queued)
    await until(lambda: omni.health().ready)
    assert await is_free_everywhere(omni)


@with_shared_system
async def test_abort_of_a_running_request(omni: OmniSystem) -> None:
    for where in ("top", "bottom"):
        held = ask(omni, hold=where)
        held.abort()
        held.abort()
        with pytest.raises(Aborted):
            await read(held)
        assert await is_free_everywhere(omni)


@with_shared_system
async def test_abort_of_a_streaming_request(omni: OmniSystem) -> None:
    before = aborted(omni)
    held = ask(omni, modalities=("text", "audio"), hold="bottom")
    with trio.fail_after(WATCHDOG_S):
        assert (await anext(aiter(held))).stage == "top"
    held.abort()
    with pytest.raises(Aborted):
        await read(held)
    assert await is_free_everywhere(omni)
    assert aborted(omni) == before + 1


@with_shared_system
async def test_abort_after_the_end_changes_nothing(omni: OmniSystem) -> None:
    before = aborted(omni)
    generation = ask(omni)
    assert len(await read(generation)) == 1
    generation.abort()
    assert await read(generation) == []
    assert aborted(omni) == before


async def test_abort_of_a_request_whose_stage_hangs_is_immediate() -> None:
    overrides = {"stages.second.shutdown_timeout_s": 0.1}
    async with OmniSystem.open("echo", **overrides) as omni:
        hanging = ask(omni, echo={"stage": "second", "hang": True})
        hanging.abort()
        assert in_flight(omni) == 0
        with pytest.raises(Aborted):
            await read(hanging)
        assert [output.delta for output in await read(ask(omni, modalities=("text",)))] == ["x"]


@with_shared_system
async def test_a_deadline_ends_the_request_everywhere(omni: OmniSystem) -> None:
    for deadline_s in (0.05, 0.0):
        late = omni.submit({"script": [Input({"hold": "bottom"})]}, ["audio"], deadline_s=deadline_s)
        with pytest.raises(DeadlineExceeded) as caught:
            await read(late)
        assert caught.value.deadline_s == deadline_s
    assert await is_free_everywhere(omni)


async def test_the_deadline_of_the_pipeline_applies_to_a_request_without_one(alone: Pipeline) -> None:
    async with OmniSystem.open(alone, **{"limits.deadline_s": 0.05}) as omni:
        with pytest.raises(DeadlineExceeded):
            await read(ask(omni, modalities=("text",), hold="top"))


@with_shared_system
async def test_a_dropped_stream_aborts_its_request(omni: OmniSystem) -> None:
    held = ask(omni, hold="bottom")
    assert in_flight(omni) == 1
    del held
    await until(lambda: in_flight(omni) == 0)
    async for output in ask(omni, modalities=("text", "audio"), hold="bottom"):
        assert output.stage == "top"
        break
    await until(lambda: in_flight(omni) == 0)
    assert await is_free_everywhere(omni)


def test_a_cancelled_reader_loses_nothing(echo: SharedSystem) -> None:
    async def work(omni: OmniSystem) -> None:
        generation = omni.submit({"script": [Input({"n": n}) for n in range(50)]}, ["text"])
        got: list[Output] = []
        dice = random.Random(0)
        with trio.fail_after(WATCHDOG_S):
            while not (got and got[-1].finished):
                with trio.move_on_after(dice.choice([0, 0.0005, 0.002])):
                    got.append(await anext(generation))
        assert [output.data["n"] for output in got] == list(range(50))

    echo.run(work)


async def test_aborted_requests_do_not_accumulate_before_a_stage_that_hangs() -> None:
    """Their input waits for room in a ring; the abort ends the task that sends it."""
    overrides = {"stages.only.ring_bytes": 4096, "stages.only.shutdown_timeout_s": 0.1, "limits.max_requests": 4}
    async with OmniSystem.open(ONE, **overrides) as omni:
        hanging = ask(omni, echo={"hang": True})
        tasks: list[int] = []
        for _ in range(4):
            aborted = omni.submit({"script": [Input({}, {"pixels": np.zeros(100_000, np.uint8)})]}, ["audio"])
            await trio.testing.wait_all_tasks_blocked()  # its input waits for room
            aborted.abort()
            await until(lambda: in_flight(omni) == 1)
            tasks.append(trio.lowlevel.current_statistics().tasks_living)
        await until(lambda: trio.lowlevel.current_statistics().tasks_living <= tasks[0])
        hanging.abort()


# Bounds


@with_shared_system
async def test_past_max_requests_admission_is_refused(omni: OmniSystem) -> None:
    held = [ask(omni, hold="top") for _ in range(MAX_REQUESTS)]
    with pytest.raises(Overloaded) as caught:
        ask(omni)
    assert caught.value.limit == MAX_REQUESTS
    assert caught.value.retry_after_s > 0
    held.pop().abort()
    assert len(await read(ask(omni))) == 1
    assert in_flight(omni) == MAX_REQUESTS - 1
    for generation in held:
        generation.abort()


async def test_unread_output_is_bounded() -> None:
    overrides = {
        "limits.output_bytes": 100_000,
        "stages.only.options.payload_bytes": 9_000,
        "stages.only.options.fan_out": 1000,
    }
    async with OmniSystem.open(ONE, **overrides) as omni:
        slow = omni.submit({"script": [Input({})]}, ["audio"])
        await until(lambda: in_flight(omni) == 0)
        with pytest.raises(SlowConsumer) as caught:
            await read(slow)
        assert (caught.value.limit, caught.value.bound) == ("output_bytes", 100_000)
        assert 100_000 < caught.value.unread_bytes <= 120_000
        assert unread(omni) == 0
        assert len(await read(omni.submit({"script": [Input({"text": "x"})]}, ["audio"]))) == 1000


# Input and parameters


@with_shared_system
async def test_input_that_cannot_be_encoded_fails_only_its_own_request(omni: OmniSystem) -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"deeper": deep}
    for piece in (
        Input({"thing": object()}),
        Input({"number": 10**30}),
        Input(deep),
        Input({}, {"array": np.array([object()])}),
        Input({}, {"array": [1, 2, 3]}),
        Input(5),  # type: ignore[arg-type]
    ):
        fine = omni.submit({"script": [Input({"text": "x"})]}, ["audio"])
        with pytest.raises(InvalidRequest, match="cannot be encoded"):
            await read(omni.submit({"script": [piece]}, ["audio"]))
        assert len(await read(fine)) == 1


@with_shared_system
async def test_parameters_that_cannot_be_encoded_are_refused(omni: OmniSystem) -> None:
    for value in (object(), 10**30, "x" * 200_000):
        with pytest.raises(InvalidRequest, match="parameters of stage"):
            omni.submit({"script": [Input({})]}, ["audio"], anything=value)
    assert len(await read(omni.submit({"script": [Input({})]}, ["audio"], anything="x" * 60_000))) == 1
    assert await is_free_everywhere(omni)


@with_shared_system
async def test_a_kind_without_a_piece_is_refused_as_no_input(omni: OmniSystem) -> None:
    with pytest.raises(InvalidRequest, match="no input"):
        omni.submit({"script": []}, ["audio"])


def test_a_request_without_a_route_is_refused_at_once(echo: SharedSystem) -> None:
    async def work(omni: OmniSystem) -> None:
        unknown: dict[str, Any] = {"temperature": 1.0}
        for kind, modalities, params in (
            ("smell", ["audio"], {}),
            ("script", ["smell"], {}),
            ("script", [], {}),
            ("script", ["audio"], unknown),
        ):
            with pytest.raises(InvalidRequest):
                omni.submit({kind: [Input({})]}, modalities, **params)
        assert in_flight(omni) == 0

    echo.run(work)


# Graphs and replicas


@with_shared_system
async def test_requests_wait_for_a_stage_that_restarts(omni: OmniSystem) -> None:
    await lose_bottom(omni)
    waiting = [ask(omni) for _ in range(3)]
    assert omni.metrics.registry.get_sample_value("omni_requests_queued") == 3
    for generation in waiting:
        assert len(await read(generation)) == 1


async def test_a_diamond_fans_out_and_joins() -> None:
    """script ─► top ─► left ──► join ─► audio
             └──► right ─► ┘  ▲
    words ────────────────────┘"""
    pipeline = Pipeline(
        name="diamond",
        stages={
            "top": Stage(engine="echo", accepts=("script",), options={"fan_out": 3}),
            "left": Stage(engine="echo", inputs=("top",)),
            "right": Stage(engine="echo", inputs=("top",), options={"fan_out": 2}),
            "join": Stage(engine="echo", accepts=("words",), inputs=("left", "right"), emits="audio"),
        },
    )
    async with OmniSystem.open(pipeline) as omni:
        words, script = [Input({"text": "words"}) for _ in range(4)], [Input({"text": "script"})]
        outputs = await read(omni.submit({"script": script, "words": words}, ["audio"]))
        texts = [output.data["text"] for output in outputs]
        assert sorted(texts) == ["script"] * 9 + ["words"] * 4
        assert [output.finished for output in outputs] == [False] * 12 + [True]
        metrics = outputs[-1].metrics
        assert metrics is not None
        assert set(metrics.stages) == {"top", "left", "right", "join"}
        assert set(metrics.stages["top"].sent_bytes) == {"left.0", "right.0"}
        assert len(await read(omni.submit({"script": script}, ["audio"]))) == 9
        assert len(await read(omni.submit({"words": words}, ["audio"]))) == 4
        workers = {address.stage: replica.worker for address, replica in omni._supervisor.replicas.items()}
        assert {stage for stage, worker in workers.items() if worker and worker.mailbox.delay_delivery} == {
            "left",
            "right",
        }


def test_a_payload_larger_than_every_ring_arrives_unchanged(echo: SharedSystem) -> None:
    pixels = np.random.default_rng(1).integers(0, 255, (3, 333, 777), np.uint8)

    async def work(omni: OmniSystem) -> None:
        inputs = {"script": [Input({"n": n}, {"pixels": pixels + n}) for n in range(3)]}
        outputs = await read(omni.submit(inputs, ["audio"]))
        assert [output.data["n"] for output in outputs] == [0, 1, 2]
        for n, output in enumerate(outputs):
            assert np.array_equal(output.tensors["pixels"].numpy(), pixels + n)

    echo.run(work)


async def test_32_concurrent_requests_each_get_their_own_outputs_in_order() -> None:
    overrides = {"stages.first.options.fan_out": 2, "stages.second.replicas": 2, "stages.second.ring_bytes": 4096}
    got: dict[int, list[Any]] = {}

    async def client(omni: OmniSystem, number: int) -> None:
        pieces = [Input({"client": number, "seq": seq}, {"mark": np.full(500, number)}) for seq in range(5)]
        outputs = await read(omni.submit({"script": pieces}, ["text", "audio"], request_id=f"r{number}"))
        assert {output.request_id for output in outputs} == {f"r{number}"}
        assert all((output.tensors["mark"].numpy() == number).all() for output in outputs)
        got[number] = [(o.modality, o.data["client"], o.data["seq"]) for o in outputs]

    async with OmniSystem.open("echo", **overrides) as omni, trio.open_nursery() as nursery:
        for number in range(32):
            nursery.start_soon(client, omni, number)
    for number in range(32):
        for modality in ("text", "audio"):
            mine = [(client, seq) for kind, client, seq in got[number] if kind == modality]
            assert mine == [(number, seq) for seq in range(5) for _ in range(2)]


async def test_load_is_spread_over_replicas(alone: Pipeline) -> None:
    async with OmniSystem.open(alone, **{"stages.top.replicas": 2}) as omni:
        held = [ask(omni, modalities=("text",), hold="top") for _ in range(4)]
        loads = [
            omni.metrics.registry.get_sample_value("omni_stage_requests", {"stage": "top", "replica": str(replica)})
            for replica in range(2)
        ]
        assert loads == [2, 2]
        assert len(held) == 4
