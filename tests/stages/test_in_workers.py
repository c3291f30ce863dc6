"""Every engine in a worker: the cases of the conformance suite, as requests to a pipeline.

The suite itself drives engines in this process. Here each engine has a stage of a running system; what feeds it and
what it feeds, if not the client, are stages with the engine "echo", which repeat chunks as they are. What comes out
must be what the suite's driver gets here. With `--world`, the stages are on different nodes (``tests.support.worlds``).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import trio

from omni_actors import OmniSystem
from omni_actors.config import Pipeline, Restart, Stage
from omni_actors.errors import InvalidRequest
from omni_actors.generation import Generation
from omni_actors.orchestrator.pieces import Input
from omni_actors.outputs import Output
from omni_actors.stages.base import CLIENT, StageOutput
from tests.stages.conftest import OpenedBy
from tests.support.echo_systems import generation_of, pid_of, wait_restarted
from tests.support.engine_cases import Case
from tests.support.engine_driver import for_stages
from tests.support.shared_system import SharedSystem, open_shared_system

pytestmark = [pytest.mark.usefixtures("clear_choices"), pytest.mark.slow]
ENGINE, AFTER = "engine", "after"
ADDED = ("weights_version",)
"""What echo adds to the data of a chunk."""
WATCHDOG_S = 100.0


def pipeline(case: Case, opened: OpenedBy) -> Pipeline:
    quick = Restart(intensity=1000, backoff_s=0.01, backoff_max_s=0.01)
    wiring: dict[str, Any] = {"accepts": ("script",)} if case.source == CLIENT else {"inputs": (case.source,)}
    engine = Stage(
        engine=opened.engine,
        model=None if opened.model is None else str(opened.model),
        options=opened.options,
        threads=1,
        restart=quick,
        **wiring,
    )
    before = {} if case.source == CLIENT else {case.source: Stage(engine="echo", accepts=("script",), restart=quick)}
    after = Stage(engine="echo", inputs=(ENGINE,), emits="text", restart=quick)
    return Pipeline(name="case", stages={**before, ENGINE: engine, AFTER: after})


@pytest.fixture(scope="module")
def workers(case: Case, opened_by: Callable[..., OpenedBy], fixture_processes: set[int]) -> Iterator[SharedSystem]:
    """A system whose stage "engine" has the engine of the case."""
    name, model, options = opened_by(case.opened)
    opening = pipeline(case, OpenedBy(name, model, options))
    with open_shared_system(lambda: OmniSystem.open(opening), fixture_processes, clear_choices=True) as system:
        yield system


def ask(omni: OmniSystem, case: Case, which: int) -> Generation:
    pieces = [Input(data, tensors) for data, tensors in case.inputs[which]]
    return omni.submit({"script": pieces}, ("text",), **case.params)


async def read(generation: Generation, on_first: Callable[[], None] = lambda: None) -> list[Output]:
    outputs: list[Output] = []
    with trio.fail_after(WATCHDOG_S):
        async for output in generation:
            if not outputs:
                on_first()
            outputs.append(output)
    return outputs


def check(case: Case, driver: Any, outputs: list[Output], which: int) -> None:
    """What the stage after the engine has received is what input number ``which`` gives in this process."""
    expected = case.outputs(driver, which)
    downstream = {name for output in expected for name in output.downstream}
    arrays = {name for output in expected for name, each in for_stages(output).items() if isinstance(each, np.ndarray)}
    received = []
    for output in outputs:
        tensors = {name: each.numpy() if name in arrays else each for name, each in output.tensors.items()}
        below = {name: tensors.pop(name) for name in downstream & tensors.keys()}
        data = {name: value for name, value in output.data.items() if name not in ADDED}
        received.append(StageOutput(0, tensors, data, output.finished, downstream=below))
    case.check(driver, received, which)


def test_requests_side_by_side_give_what_each_gives_here(workers: SharedSystem, case: Case, driver: Any) -> None:
    async def work(omni: OmniSystem) -> None:
        generations = [ask(omni, case, which) for which in (0, 1)]
        for which, generation in enumerate(generations):
            check(case, driver, await read(generation), which)

    case.outputs(driver, 0)  # not in the event loop
    case.outputs(driver, 1)
    workers.run(work)


def test_a_request_goes_on_after_the_death_of_its_worker(workers: SharedSystem, case: Case, driver: Any) -> None:
    async def work(omni: OmniSystem) -> None:
        before = generation_of(omni, ENGINE)
        victim = pid_of(omni, ENGINE)
        check(case, driver, await read(ask(omni, case, 0), lambda: os.kill(victim, signal.SIGKILL)), 0)
        await wait_restarted(omni, ENGINE, before + 1)
        check(case, driver, await read(ask(omni, case, 1)), 1)

    case.outputs(driver, 0)
    case.outputs(driver, 1)
    workers.run(work)


def test_a_bad_chunk_refuses_its_own_request_only(workers: SharedSystem, case: Case, driver: Any) -> None:
    async def work(omni: OmniSystem) -> None:
        good = ask(omni, case, 1)
        bad = omni.submit({"script": [Input(*case.refused)]}, ("text",), **case.params)
        with pytest.raises(InvalidRequest) as refusal:
            await read(bad)
        assert refusal.value.param
        check(case, driver, await read(good), 1)

    case.outputs(driver, 1)
    workers.run(work)


def test_an_abort_leaves_others_as_they_are(workers: SharedSystem, case: Case, driver: Any) -> None:
    async def work(omni: OmniSystem) -> None:
        aborted, other = ask(omni, case, 0), ask(omni, case, 1)
        async for _ in aborted:
            break
        aborted.abort()
        check(case, driver, await read(other), 1)

    case.outputs(driver, 1)
    workers.run(work)
