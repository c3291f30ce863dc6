"""LoRA adapters with real processes and signals: an answer goes on with the adapter with which it began."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from omni_actors import OmniSystem
from omni_actors.config import Pipeline, Restart, Stage
from tests.support.adapters import LLAMA_TARGETS, write_adapter
from tests.support.echo_systems import generation_of, pid_of, wait_restarted
from tests.support.shared_system import SharedSystem, open_shared_system
from tiny_models.llama import save_model

pytestmark = pytest.mark.slow  # make test does it with the echo engine: tests/test_loras.py

WATCHDOG_S = 100.0
QUESTION = "the quick brown fox jumps over the lazy dog"
SAMPLED = {"temperature": 1.0, "seed": 3, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def shared_system(
    fixture_processes: set[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[SharedSystem, Path]]:
    model = save_model(tmp_path_factory.mktemp("llama"))
    for seed, name in enumerate(("one", "other")):
        write_adapter(model / name, model, LLAMA_TARGETS, seed=seed)
    often = Restart(intensity=100, backoff_s=0.01, backoff_max_s=0.01)
    options = {"context": 128, "prefill_chunk": 7, "prefix_cache_mb": 1}
    stage = Stage(
        engine="llm", model=str(model), accepts=("messages",), emits="text", threads=1, options=options, restart=often
    )
    pipeline = Pipeline(name="tiny", stages={"only": stage})
    with open_shared_system(lambda: OmniSystem.open(pipeline), fixture_processes, clear_choices=True) as opened:
        yield opened, model


@pytest.mark.parametrize("removed", [False, True], ids=["replaced", "removed"])
@pytest.mark.parametrize("kill_at", [1, 7])
def test_an_answer_goes_on_with_its_adapter(
    shared_system: tuple[SharedSystem, Path], kill_at: int, removed: bool
) -> None:
    opened, model = shared_system

    async def work(omni: OmniSystem) -> None:
        generation = generation_of(omni, "only")
        with trio.fail_after(WATCHDOG_S):
            plain = await omni.generate(QUESTION, **SAMPLED).text()
            await omni.add_lora("voice", model / "one")
            expected = await omni.generate(QUESTION, lora="voice", **SAMPLED).text()
            assert expected != plain
            running, found = omni.generate(QUESTION, lora="voice", **SAMPLED), ""
            for _ in range(kill_at):
                found += str((await anext(running)).delta or "")
            if removed:
                await omni.remove_lora("voice")
            else:
                await omni.add_lora("voice", model / "other")
            os.kill(pid_of(omni, "only"), signal.SIGKILL)
            found += "".join([str(output.delta or "") async for output in running])
            assert found == expected
        await wait_restarted(omni, "only", generation + 1)
        if not removed:
            other = await omni.generate(QUESTION, lora="voice", **SAMPLED).text()
            assert other not in (plain, expected)
            await omni.remove_lora("voice")

    opened.run(work)


def test_the_prefix_cache_has_figures_and_is_reset(shared_system: tuple[SharedSystem, Path]) -> None:
    opened, _ = shared_system

    async def work(omni: OmniSystem) -> None:
        with trio.fail_after(WATCHDOG_S):
            expected = await omni.generate(QUESTION, **SAMPLED).text()
            assert await omni.generate(QUESTION, **SAMPLED).text() == expected
            while b'omni_prefix_cache_hits{replica="0",stage="only"}' not in omni.metrics.exposition():  # noqa: ASYNC110
                await trio.sleep(0.1)
            [reply] = (await omni.reset_prefix_cache())["only"]
            assert reply.result() is True
            assert await omni.generate(QUESTION, **SAMPLED).text() == expected

    opened.run(work)
