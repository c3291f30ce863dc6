"""Order, joins, bounds and invalid input of requests, with real workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import trio

from omni_actors.config import Pipeline, Stage
from omni_actors.errors import InvalidRequest, Overloaded, SlowConsumer
from omni_actors.orchestrator.pieces import Input
from omni_actors.system import OmniSystem
from tests.orchestrator.census import MAX_REQUESTS, ONE, ask, in_flight, is_free_everywhere, lose_bottom
from tests.support.echo_systems import one_stage, read, until
from tests.support.shared_system import SharedSystem, with_shared_system


def unread(omni: OmniSystem) -> float:
    value = omni.metrics.registry.get_sample_value("omni_unread_bytes")
    assert value is not None
    return value


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


def invalid_input() -> Iterator[Input]:
    """Yield pieces of input that cannot be encoded."""
    yield Input({"thing": object()})
    yield Input({"number": 10**30})
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"deeper": deep}
    yield Input(deep)
    yield Input({}, {"array": np.array([object()])})
    yield Input({}, {"array": [1, 2, 3]})
    yield Input({3: "x"})  # type: ignore[dict-item]
    yield Input({}, {3: np.zeros(1)})  # type: ignore[dict-item]
    yield Input(5)  # type: ignore[arg-type]


@with_shared_system
async def test_input_that_cannot_be_encoded_fails_only_its_own_request(omni: OmniSystem) -> None:
    for piece in invalid_input():
        fine = omni.submit({"script": [Input({"text": "x"})]}, ["audio"])
        with pytest.raises(InvalidRequest, match="cannot be encoded"):
            await read(omni.submit({"script": [piece]}, ["audio"]))
        assert len(await read(fine)) == 1


async def test_input_that_cannot_be_encoded_is_routed_by_its_prefix_too() -> None:
    async with OmniSystem.open(one_stage(routing="prefix")) as omni:
        for piece in invalid_input():
            with pytest.raises(InvalidRequest, match="cannot be encoded"):
                await read(omni.submit({"script": [piece]}, ["audio"]))
        assert in_flight(omni) == 0


@with_shared_system
async def test_input_that_is_too_large_for_a_message_fails_only_its_own_request(omni: OmniSystem) -> None:
    untouched = np.zeros(1 << 32, np.uint8)  # it takes no memory until it is written
    fine = omni.submit({"script": [Input({"text": "x"})]}, ["audio"])
    with pytest.raises(InvalidRequest, match="cannot be sent: a message of"):
        await read(omni.submit({"script": [Input({}, {"array": untouched})]}, ["audio"]))
    assert len(await read(fine)) == 1


@with_shared_system
async def test_parameters_that_cannot_be_encoded_are_refused(omni: OmniSystem) -> None:
    for value in (object(), 10**30, "x" * 200_000):
        with pytest.raises(InvalidRequest, match="parameters of stage"):
            omni.submit({"script": [Input({})]}, ["audio"], anything=value)
    assert len(await read(omni.submit({"script": [Input({})]}, ["audio"], anything="x" * 60_000))) == 1
    assert await is_free_everywhere(omni)


@with_shared_system
async def test_parameters_that_are_too_large_together_are_refused_by_the_name_of_the_largest(omni: OmniSystem) -> None:
    with pytest.raises(InvalidRequest, match=r"^long: the parameters of stage '.*; the limit is 65536$") as caught:
        omni.submit({"script": [Input({})]}, ["audio"], short="x" * 20_000, long="x" * 50_000)
    assert caught.value.param == "long"


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
