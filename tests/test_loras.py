"""LoRA adapters of a system: which requests get which, through restarts of workers and changes of names."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio

from omni_actors.config import Pipeline, Stage
from omni_actors.errors import InvalidAdapter, InvalidRequest, TooManyCalls, Unsupported, WorkerLost
from omni_actors.generation import Generation
from omni_actors.orchestrator.pieces import Input
from omni_actors.protocol.messages import Desired
from omni_actors.serve.app import admission_to, build
from omni_actors.serve.media.loader import MediaLoader
from omni_actors.serve.pipelines import Pipelines
from omni_actors.serve.settings import ServerSettings
from omni_actors.stages.adapters.files import read
from omni_actors.stages.adapters.options import KEEP
from omni_actors.supervisor.calls import MAX_CALLS
from omni_actors.sync import Omni
from omni_actors.system import OmniSystem
from tests.support.echo_systems import OFTEN, WATCHDOG_S, pid_of, until, wait_restarted, words_until
from tests.support.frozen import freeze

PIPELINE = Pipeline(
    name="marked",
    stages={
        "first": Stage(engine="echo", accepts=("script",), emits="text", restart=OFTEN, options={"step_s": 0.01}),
        "second": Stage(engine="echo", inputs=("first",), emits="audio", restart=OFTEN),
    },
)


def saved(directory: Path, weights: str) -> Path:
    """Save files that the echo engine takes for an adapter."""
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    (directory / "adapter_model.safetensors").write_text(weights)
    return directory


def mark(name: str, directory: Path) -> str:
    """What the echo engine adds to a text."""
    return f"[{name} {read(str(directory)).digest[:8]}]"


@asynccontextmanager
async def opened() -> AsyncIterator[OmniSystem]:
    with trio.fail_after(WATCHDOG_S):
        async with OmniSystem.open(PIPELINE) as omni:
            yield omni


def ask(omni: OmniSystem, lora: str | None, pieces: int = 1, modalities: tuple[str, ...] = ("text",)) -> Generation:
    return omni.submit({"script": [Input({"text": "x"})] * pieces}, modalities, lora=lora)


async def test_a_request_names_its_adapter(tmp_path: Path) -> None:
    one, two = saved(tmp_path / "one", "1"), saved(tmp_path / "two", "2")
    async with opened() as omni:
        assert (await omni.add_lora("a", one)).stages == ("first", "second")
        await omni.add_lora("b", two, stages=["first"])
        assert [(info.name, info.stages) for info in omni.list_loras()] == [
            ("a", ("first", "second")),
            ("b", ("first",)),
        ]
        assert await ask(omni, None).text() == "x"
        assert await ask(omni, "a").text() == "x" + mark("a", one)
        assert await ask(omni, "b").text() == "x" + mark("b", two)
        assert await ask(omni, "a", modalities=("audio",)).text() == "x" + mark("a", one) * 2
        await omni.add_lora("a", two)
        assert await ask(omni, "a").text() == "x" + mark("a", two)
        await omni.remove_lora("a")
        with pytest.raises(InvalidAdapter, match="known: 'b'"):
            ask(omni, "a")
        assert (await omni.pin_lora("b")).pinned
        assert [info.pinned for info in omni.list_loras()] == [True]


async def test_what_cannot_be_added_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async with opened() as omni:
        for directory in (tmp_path, tmp_path / "absent", tmp_path / "nul\0"):
            with pytest.raises(InvalidAdapter):
                await omni.add_lora("a", directory)
        with pytest.raises(InvalidRequest, match="there is no stage 'third'"):
            await omni.add_lora("a", saved(tmp_path, "1"), stages=["third"])
        for name in ("", "a\nb", "x" * 129, 5):
            with pytest.raises(InvalidRequest, match="printable"):
                await omni.add_lora(name, tmp_path)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="name: found 'marked'"):
            await omni.add_lora("marked", tmp_path)
        for change in (omni.remove_lora, omni.pin_lora):
            with pytest.raises(InvalidAdapter, match="known: none"):
                await change("a")
        with pytest.raises(InvalidAdapter):
            omni.submit(
                {"script": [Input({"text": "x"})]}, ("text",), lora={"name": "a", "directory": "/", "digest": ""}
            )
        assert omni.list_loras() == []


async def test_a_request_that_uses_no_stage_with_the_adapter_is_refused(tmp_path: Path) -> None:
    async with opened() as omni:
        await omni.add_lora("a", saved(tmp_path, "1"), stages=["second"])
        with pytest.raises(Unsupported, match="'a' is of second"):
            ask(omni, "a")
        assert await ask(omni, "a", modalities=("audio",)).text() == "x" + mark("a", tmp_path)


async def test_a_stage_without_replicas_gets_no_adapter(tmp_path: Path) -> None:
    with trio.fail_after(WATCHDOG_S):
        async with OmniSystem.open(PIPELINE, overrides={"stages.second.replicas": 0}) as omni:
            with pytest.raises(WorkerLost, match=r"second.* has no replicas"):
                await omni.add_lora("a", saved(tmp_path / "a", "1"))
            assert omni.list_loras() == []


async def test_a_pipeline_without_adapters_says_so(tmp_path: Path) -> None:
    pipeline = Pipeline(
        name="bare", stages={"only": Stage(engine="hibari_vocoder", accepts=("script",), emits="audio")}
    )
    system = OmniSystem(pipeline, {}, spawner=None)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="no stage of the pipeline serves LoRA adapters"):
        await system.add_lora("a", saved(tmp_path, "1"))


@pytest.mark.slow
async def test_restarted_workers_have_the_adapters_and_requests_keep_theirs(tmp_path: Path) -> None:
    one, two = saved(tmp_path / "one", "1"), saved(tmp_path / "two", "2")
    async with opened() as omni:
        await omni.add_lora("a", one)
        killed = trio.Event()
        script = words_until(killed, *"x" * 100)
        running = omni.generate(script=script, modalities=("text",), lora="a")
        received = [await anext(running)]
        await omni.add_lora("a", two)
        os.kill(pid_of(omni, "first"), signal.SIGKILL)
        killed.set()
        received += [output async for output in running]
        assert {output.delta for output in received if output.delta} == {"x" + mark("a", one)}
        assert sum(bool(output.delta) for output in received) == 100
        assert received[-1].metrics is not None
        assert received[-1].metrics.replays == 1
        await wait_restarted(omni, "first", 2)
        assert await ask(omni, "a").text() == "x" + mark("a", two)


async def test_files_that_have_changed_are_refused_by_a_restarted_worker(tmp_path: Path) -> None:
    async with opened() as omni:
        await omni.add_lora("a", saved(tmp_path, "1"), stages=["first"])
        saved(tmp_path, "2")
        os.kill(pid_of(omni, "first"), signal.SIGKILL)
        await until(lambda: omni.health().stages["first"][0].generation == 2)
        await wait_restarted(omni, "first", 2)
        with pytest.raises(InvalidRequest, match="have changed since it was added"):
            await ask(omni, "a").text()
        assert await ask(omni, None).text() == "x"


async def test_an_adapter_is_a_model_of_the_http_server(tmp_path: Path) -> None:
    pipeline = Pipeline(name="base", stages={"only": Stage(engine="echo", accepts=("messages",), emits="text")})
    async with OmniSystem.open(pipeline) as omni:
        await omni.add_lora("marked", saved(tmp_path, "1"))
        pipelines = Pipelines([omni])
        pipelines.loaded.add("base")
        settings = ServerSettings()
        app = build(pipelines, settings, admission=admission_to(pipelines, settings), media=MediaLoader())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
            models = (await client.get("/v1/models")).json()["data"]
            assert [(each["id"], each.get("parent")) for each in models] == [("base", None), ("marked", "base")]
            assert (await client.get("/v1/models/marked")).json() == models[1]
            for route, key in (("chat/completions", "messages"), ("completions", "prompt")):
                question = "x" if key == "prompt" else [{"role": "user", "content": "x"}]
                for model, expected in (("base", "x"), ("marked", "x" + mark("marked", tmp_path))):
                    found = (await client.post(f"/v1/{route}", json={"model": model, key: question})).json()
                    [choice] = found["choices"]
                    assert (choice.get("text") or choice["message"]["content"]) == expected
                    assert found["model"] == model
            body = {"model": "base", "prompt": "x", "lora": {"name": "marked", "directory": "/", "digest": ""}}
            assert (await client.post("/v1/completions", json=body)).status_code == 400
            unknown = await client.post("/v1/completions", json={"model": "other", "prompt": "x"})
            assert unknown.status_code == 404
            assert "this server serves 'base', 'marked'" in unknown.text


def test_the_blocking_face_has_the_methods(tmp_path: Path) -> None:
    with Omni.open(PIPELINE) as omni:
        assert omni.add_lora("a", saved(tmp_path, "1"), stages=["first"]).name == "a"
        assert omni.generate(script="x", lora="a").text() == "x" + mark("a", tmp_path)
        assert omni.pin_lora("a").pinned
        omni.remove_lora("a")
        assert omni.list_loras() == []


@pytest.mark.parametrize("stuck", ["first", "second"])
async def test_a_change_that_a_worker_cannot_be_told_changes_no_stage(tmp_path: Path, stuck: str) -> None:
    async with opened() as omni:
        await omni.add_lora("a", saved(tmp_path / "a", "1"))
        desired = {stage: adapters_kept(omni, stage) for stage in PIPELINE.stages}
        assert all(desired.values())
        freeze(frozen := pid_of(omni, stuck))
        for _ in range(MAX_CALLS):
            await omni.set_desired("freeze", {"frozen": False}, stages=[stuck], timeout_s=0.0)
        with pytest.raises(TooManyCalls):
            await omni.remove_lora("a")
        assert [info.name for info in omni.list_loras()] == ["a"]
        assert {stage: adapters_kept(omni, stage) for stage in PIPELINE.stages} == desired
        os.kill(frozen, signal.SIGCONT)


def adapters_kept(omni: OmniSystem, stage: str) -> list[Desired]:
    """Return what the next worker of a stage will be told of adapters."""
    desired = [part.desired for part in omni._supervisor.desired.parts(stage)]
    return [each for each in desired if each.capability == KEEP]
