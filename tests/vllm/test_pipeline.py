"""Qwen3-Omni's three stages in real workers, the thinker on vLLM; a tiny checkpoint with random weights."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from omni_actors import OmniSystem
from omni_actors.config import Pipeline, Restart, Stage
from omni_actors.errors import InvalidRequest, StageCrashed
from tests.support.closeness import assert_same_sound
from tests.support.shared_system import SharedSystem, open_shared_system, with_shared_system
from tests.support.spoken_answers import SPOKEN, STORY, read, sound_of, text_of
from tests.support.vllm_options import ENGINE_ARGS
from tiny_models import vllm as tiny

ASKED = {**SPOKEN, "max_tokens": 60, "talker_max_tokens": 61}
LONG = STORY * 12
"""A prompt of several prefill chunks."""
STEP_S = 6.0
WATCHDOG_S = 100.0
TRIES = 3


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedSystem]:
    """Check that the workers leave no temporary file, however they end."""
    temporary = tmp_path_factory.mktemp("temporary")
    model = str(tiny.qwen3(tmp_path_factory.mktemp("omni"), text_eos=0.0, codec_eos=0.0))
    options = {"engine_args": {**ENGINE_ARGS, "logits_processors": ["tests.vllm.processors:Faulty"]}}
    accepts = ("audio", "image", "messages", "video")
    stages = {
        "thinker": Stage(
            engine="vllm_qwen3_thinker",
            model=model,
            threads=1,
            accepts=accepts,
            emits="text",
            options=options,
            step_timeout_s=STEP_S,
            restart=Restart(intensity=9),
        ),
        "talker": Stage(engine="qwen3_talker", model=model, threads=1, inputs=("thinker",)),
        "code2wav": Stage(engine="qwen3_code2wav", model=model, threads=1, inputs=("talker",), emits="audio"),
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TMPDIR", str(temporary))
        with open_shared_system(
            lambda: OmniSystem.open(Pipeline(name="tiny", stages=stages)), fixture_processes
        ) as shared_system:
            yield shared_system
    assert list(temporary.iterdir()) == []


def thinker_pid(omni: OmniSystem) -> int | None:
    [replica] = omni.health().stages["thinker"]
    return replica.pid


def kill(omni: OmniSystem) -> None:
    pid = thinker_pid(omni)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


@with_shared_system
async def test_each_stage_begins_before_its_upstream_stage_has_ended(omni: OmniSystem) -> None:
    """A worker that stands still may be late. Then another request shows it."""
    with trio.fail_after(WATCHDOG_S):
        for _ in range(TRIES):
            outputs = await read(omni.generate(STORY, **ASKED))
            assert len(sound_of(outputs)) == 60 * 1920 - 555
            metrics = outputs[-1].metrics
            assert metrics is not None
            is_early = metrics.stages["talker"].first_output_s < metrics.stages["thinker"].finished_s
            if is_early:
                break
    assert is_early
    assert metrics.stages["thinker"].sent_bytes["talker.0"] > 4 * 64 * (60 - 1 + 10), "one row per token"


@with_shared_system
async def test_a_thinker_killed_during_decoding_changes_nothing_for_the_client(omni: OmniSystem) -> None:
    expected = await read(omni.generate(STORY, **ASKED))
    outputs = await read(omni.generate(STORY, **ASKED), lambda: kill(omni))
    assert text_of(outputs) == text_of(expected)
    assert_same_sound(sound_of(outputs), sound_of(expected))


@asynccontextmanager
async def held_in_a_step(omni: OmniSystem, at: int) -> AsyncIterator[None]:
    """Hold a request with a prompt of several prefill chunks in step number ``at``. It is answered after the block."""
    expected = text_of(await read(omni.generate(LONG, max_tokens=8)))
    answered: list[str] = []
    with tempfile.TemporaryDirectory() as directory, trio.fail_after(WATCHDOG_S):
        fifo = Path(directory) / "held"
        os.mkfifo(fifo)

        async def ask() -> None:
            fault = {"fault": "hang", "at": at, "notify": str(fifo)}
            answered.append(text_of(await read(omni.generate(LONG, max_tokens=8, extra_args=fault))))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.to_thread.run_sync(fifo.read_bytes, abandon_on_cancel=True)  # until the engine opens it
            fifo.unlink()
            yield
    assert answered == [expected]


@with_shared_system
async def test_a_thinker_killed_during_prefill_and_during_loading_comes_back(omni: OmniSystem) -> None:
    """The fixture ``leaves_nothing_behind`` looks for leftover processes and shared memory."""
    async with held_in_a_step(omni, at=2):
        before = thinker_pid(omni)
        kill(omni)
        while thinker_pid(omni) in (before, None):
            await omni.wait_changed()
        kill(omni)  # the new incarnation, which has just begun to load


@with_shared_system
async def test_a_hanging_worker_is_killed_and_its_request_replayed(omni: OmniSystem) -> None:
    """The worker hangs in the middle of an answer, and only the supervisor ends it."""
    async with held_in_a_step(omni, at=9):
        pass
    [replica] = omni.health().stages["thinker"]
    assert f"no progress for {STEP_S:g} s (step_timeout_s)" in (replica.last_exit or "")


@with_shared_system
async def test_an_exception_in_a_step_reaches_the_client_and_the_stage_comes_back(omni: OmniSystem) -> None:
    fault: dict[str, Any] = {"fault": "raise", "at": 3}
    with trio.fail_after(WATCHDOG_S):
        with pytest.raises(StageCrashed, match="exited with code 1") as crashed:
            await read(omni.generate(STORY, max_tokens=8, extra_args=fault, on_failure="fail"))
        assert (crashed.value.stage, crashed.value.exit_code) == ("thinker", 1)
        assert "the request asked for a crash in a step" in "".join(crashed.value.stderr_tail)
        assert text_of(await read(omni.generate(STORY, max_tokens=8)))


@with_shared_system
async def test_vllms_metrics_are_among_the_systems(omni: OmniSystem) -> None:
    """The metrics are as of the last ping. One comes soon after the request."""
    await read(omni.generate(STORY, max_tokens=8))
    labels = {"stage": "thinker", "replica": "0", "name": "generation_tokens"}
    with trio.fail_after(WATCHDOG_S):
        while not omni.metrics.registry.get_sample_value("omni_engine", labels):  # noqa: ASYNC110 - no event announces it
            await trio.sleep(0.01)
    figures = omni.metrics.exposition().decode()
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions"):
        assert f'omni_engine{{name="{name}",replica="0",stage="thinker"}}' in figures


@with_shared_system
async def test_a_prompt_beyond_the_context_is_refused(omni: OmniSystem) -> None:
    with pytest.raises(InvalidRequest, match="1023") as refused:
        await read(omni.generate("word " * 2000, max_tokens=4))
    assert refused.value.code == "context_length_exceeded"
