"""Prefill apart from decode, with real processes that die before, during and after the transfer of a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from omni_actors import OmniSystem
from omni_actors.config import Limits, Pipeline, Restart, Stage
from omni_actors.errors import InvalidRequest, TemporarilyRefused, Unsupported
from tests.support.on_gpu import ON_GPU
from tests.support.shared_system import SharedSystem, open_shared_system

pytestmark = pytest.mark.voice

WATCHDOG_S, CONTEXT = 60.0, 128
BLOCK, PROMPT = 16, 90
"""Positions of a block, and of the prompt: 6 blocks."""
ROLES = "prefill", "decode"
LAYERS = 2
"""Of the tests' model."""
WIDE = {"head_dim": 256}
"""A block's keys in one layer take 32 KiB: a device's memory takes nothing smaller than 16 KiB by handle."""
TRANSFER = {("prefill", "output"), ("decode", "feed")}
"""Where a death's number counts the chunks of the transfer."""
PARAMS: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 1.0, "seed": 5, "frequency_penalty": 0.5}
ENGINE = "tests.support.killed_prefill:make"


def plan_of(directory: Path, stage: str) -> Path:
    return directory / f"{stage}.json"


def split(
    model: Path,
    plans: Path | None = None,
    *,
    layers: int = 0,
    handles: Any = "none",
    device: str = "cpu",
    **limits: Any,
) -> Pipeline:
    """The two stages. plans: the directory of their plans of deaths; None: the shipped engine.

    layers: in one chunk; 0: all. handles: ``device_handles``.
    """
    quick = Restart(intensity=1000, backoff_s=0.01, backoff_max_s=0.01)

    def stage(role: str, **wiring: Any) -> Stage:
        options: dict[str, Any] = {"role": role, "context": CONTEXT, "prefill_chunk": BLOCK}
        if role == "prefill":
            options["chunk_layers"] = layers
        if plans is None:
            return Stage(engine="llm", model=str(model), device=device, options=options, restart=quick, **wiring)
        plan_of(plans, role).write_text("[]")
        options |= {"engine": "llm", "plan": str(plan_of(plans, role))}
        more = {"device": device, "restart": quick, **wiring}
        return Stage(engine=ENGINE, model=str(model), options=options, resumable=True, **more)

    stages = {
        "prefill": stage("prefill", accepts=("messages",)),
        "decode": stage("decode", inputs=("prefill",), emits="text"),
    }
    return Pipeline(name="split", stages=stages, limits=Limits(**limits), device_handles=handles)


def prompt(size: int = PROMPT) -> dict[str, Any]:
    return {"prompt_token_ids": np.random.default_rng(size).integers(4, 250, size).tolist()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_models.llama import save_model

    return save_model(tmp_path_factory.mktemp("tiny"), **WIDE)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


TRANSFERS: dict[str, dict[str, Any]] = {
    "retained": {},
    "evicted": {"retain_bytes": 640_000},
    "by handle": {"handles": "host"},
    "layer by layer": {"layers": 1, "handles": "host"},
    "on a GPU": {"device": "cuda:0"},
    "on a GPU, by handle": {"device": "cuda:0", "handles": "cuda"},
    "on a GPU, layer by layer": {"layers": 1, "device": "cuda:0", "handles": "cuda"},
}
"""With "evicted", no worker retains more than the first blocks of the prompt."""
MARKS = {"by handle": pytest.mark.slow, "evicted": pytest.mark.exhaustive, "layer by layer": pytest.mark.exhaustive}
"""A worker dies 9 times in each of these."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(options, id=name, marks=ON_GPU if "device" in options else MARKS.get(name, ()))
        for name, options in TRANSFERS.items()
    ],
)
def shared_system(
    request: pytest.FixtureRequest, fixture_processes: set[int], model: Path, plans: Path
) -> Iterator[SharedSystem]:
    pipeline = split(model, plans, **request.param)
    with open_shared_system(lambda: OmniSystem.open(pipeline), fixture_processes, clear_choices=True) as shared:
        yield shared


async def answer(omni: OmniSystem, size: int = PROMPT, **params: Any) -> tuple[str, int]:
    """The text, and the number of replays."""
    with trio.fail_after(WATCHDOG_S):
        outputs = [output async for output in omni.generate(prompt(size), **{**PARAMS, **params})]
    metrics = outputs[-1].metrics
    assert metrics is not None
    return "".join(output.delta or "" for output in outputs), metrics.replays


def sends_handles(omni: OmniSystem) -> bool:
    """Whether what has passed between the stages is less than the keys and values of its blocks."""
    ring = omni.live_state().rings["prefill.0>decode.0"]
    assert ring.messages
    return ring.payload_bytes < ring.messages * 1000


BLOCKS = -(-PROMPT // BLOCK)
DEATHS = {
    "prefill before the prompt": [("prefill", "feed", 0)],
    "prefill in mid-transfer": [("prefill", "output", 3)],
    "prefill with the last chunk": [("prefill", "output", BLOCKS - 1)],
    "decode before the transfer": [("decode", "feed", 0)],
    "decode in mid-transfer": [("decode", "feed", 3)],
    "decode before the logits": [("decode", "feed", BLOCKS - 1)],
    "decode behind its first text": [("decode", "output", 0)],
    "decode in the middle of its answer": [("decode", "output", 6)],
    "both in turn": [("prefill", "output", 2), ("decode", "feed", 4)],
}


@pytest.mark.slow
@pytest.mark.parametrize("deaths", DEATHS.values(), ids=DEATHS)
def test_a_death_at_any_moment_of_a_transfer_changes_no_token(
    shared_system: SharedSystem, plans: Path, deaths: list[tuple[str, str, int]]
) -> None:
    async def work(omni: OmniSystem) -> None:
        expected, none = await answer(omni)
        assert not none
        assert sends_handles(omni) == (omni.pipeline.device_handles != "none")
        by_layer = omni.pipeline.stages["prefill"].options["chunk_layers"]
        for stage in ROLES:
            entries = [
                [place, number * LAYERS + LAYERS - 1 if by_layer and (stage, place) in TRANSFER else number]
                for other, place, number in deaths
                if other == stage
            ]
            plan_of(plans, stage).write_text(json.dumps(entries))
        text, replays = await answer(omni)
        assert text == expected
        assert all(json.loads(plan_of(plans, stage).read_text()) == [] for stage in ROLES), "no such place"
        assert replays >= 1 or deaths == DEATHS["prefill with the last chunk"]
        assert (await answer(omni))[0] == expected
        assert sends_handles(omni) == (omni.pipeline.device_handles != "none")

    shared_system.run(work)


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "handles"), [(0, "none"), (1, "none"), (1, "host")])
async def test_a_pipeline_of_shipped_engines_gives_what_one_stage_gives(
    model: Path, tmp_path: Path, layers: int, handles: str
) -> None:
    """At each length around the edges of blocks, with every parameter; and what it refuses leaves it in service."""
    options = {"context": CONTEXT, "prefill_chunk": BLOCK}
    one = Pipeline(
        name="one",
        stages={"llm": Stage(engine="llm", model=str(model), options=options, accepts=("messages",), emits="text")},
    )
    sizes = (1, *(edge + off for edge in (BLOCK, 4 * BLOCK) for off in (-1, 0, 1)), CONTEXT - 30)
    expected = {}
    async with OmniSystem.open(one) as omni:
        for size in sizes:
            expected[size] = await answer(omni, size)
    async with OmniSystem.open(split(model, layers=layers, handles=handles)) as omni:
        for size in sizes:
            assert await answer(omni, size) == expected[size], size
        with pytest.raises(InvalidRequest, match="guidance") as refused:
            await answer(omni, guidance_scale=2.0)
        assert refused.value.code == "unsupported_parameter"
        with pytest.raises(Unsupported):
            await omni.encode("hello")
        assert (await omni.tokenize("hello")).tokens
        assert await answer(omni, sizes[3]) == expected[sizes[3]]


@pytest.mark.slow
async def test_the_weights_of_both_stages_have_one_version(model: Path) -> None:
    async with OmniSystem.open(split(model)) as omni:
        before, _ = await answer(omni)
        replies = await omni.update_weights(model, version="2", stages=ROLES)
        assert all(reply.error is None for each in replies.values() for reply in each)
        assert (await answer(omni))[0] == before
        await omni.update_weights(model, version="3", stages=["prefill"])
        with pytest.raises(TemporarilyRefused, match="version '3'") as refused:
            await answer(omni)
        assert refused.value.code == "weights_version_mismatch"
        assert refused.value.retry_after_s >= 1
        await omni.update_weights(model, version="3", stages=["decode"])
        assert (await answer(omni))[0] == before


@pytest.mark.slow
async def test_a_paused_transfer_goes_on(model: Path) -> None:
    async with OmniSystem.open(split(model)) as omni:
        expected = await answer(omni)
        found: list[Any] = []

        async def ask() -> None:
            found.append(await answer(omni))

        with trio.fail_after(WATCHDOG_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await omni.pause_generation("keep")
                await omni.resume_generation()
        assert found == [expected]
