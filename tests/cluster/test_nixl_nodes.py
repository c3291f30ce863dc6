"""A system on two nodes whose large chunks NIXL carries."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Awaitable, Callable

import numpy as np
import psutil
import pytest
import trio

from omni_actors.config import Pipeline, Stage
from omni_actors.generation import Generation
from omni_actors.outputs import Output
from omni_actors.stages.echo.engine import payload
from tests.cluster.long_answers import ask_long, read_until_first, wait_ended
from tests.cluster.nixl_rings import why_no_nixl
from tests.cluster.subprocess_cluster import ClusterOf, open_on_nodes
from tests.support.echo_systems import OFTEN, WATCHDOG_S, until, wait_restarted

pytestmark = pytest.mark.skipif(why_no_nixl() is not None, reason=str(why_no_nixl()))

OUTPUTS, PAYLOAD_BYTES = 12, 5 << 18
NODES = {"first": "a", "second": "b"}
ABORTED = "NIXL has ended on this node (SIGABRT)"
"""UCX may abort a NIXL process whose peer was killed ("Endpoint timeout"). Nothing else may end it."""


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")


def large_answers() -> Pipeline:
    """Each request has ``OUTPUTS`` outputs of each stage, with payloads above ``nixl_links.LEAST``."""
    options = {"step_s": 0.05, "fan_out": OUTPUTS, "payload_bytes": PAYLOAD_BYTES}
    both = {"engine": "echo", "restart": OFTEN, "deterministic": True, "load_timeout_s": 60.0}
    first = Stage(accepts=("script",), emits="text", options=options, **both)
    second = Stage(inputs=("first",), emits="audio", options={"payload_bytes": PAYLOAD_BYTES}, **both)
    return Pipeline(name="nodes", stages={"first": first, "second": second})


def check_exact(generation: Generation, outputs: list[Output]) -> None:
    number = generation.stream.request.number
    assert number is not None
    for stage in ("first", "second"):
        mine = [output for output in outputs if output.stage == stage]
        assert len(mine) == OUTPUTS
        for seq, output in enumerate(mine):
            assert np.array_equal(output.tensors["payload"].numpy(), payload(number, seq, PAYLOAD_BYTES))


def nixl_processes(cluster: ClusterOf) -> list[psutil.Process]:
    """Return the NIXL processes of the parent and of both agents."""
    return [each for pid in (os.getpid(), *cluster.agents.pids.values()) for each in nixl_processes_of(pid)]


def nixl_processes_of(parent: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(parent).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            if "omni_actors.cluster.nixl_process" in child.cmdline():
                found.append(child)
    return found


@pytest.fixture
def wait_for_processes(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> Callable[[ClusterOf, int], Awaitable[None]]:
    """Return what waits until there are so many NIXL processes. Those that UCX aborted count too."""

    async def wait(cluster: ClusterOf, count: int) -> None:
        said = ""

        def is_so() -> bool:
            nonlocal said
            said += capfd.readouterr().err  # of the agents
            return len(nixl_processes(cluster)) + (said + caplog.text).count(ABORTED) == count

        await until(is_so)

    return wait


def carried_to_parent(cluster: ClusterOf) -> int:
    """Return how many records NIXL has carried to the parent's node."""
    return sum(link.by_reference for link in cluster.spawner._pump.statistics().values())


async def test_large_chunks_of_answers_are_carried_by_nixl_and_nothing_is_left() -> None:
    async with open_on_nodes(large_answers(), NODES, transport="nixl") as cluster:
        processes = nixl_processes(cluster)
        assert len(processes) == 3
        with trio.fail_after(WATCHDOG_S):
            while carried_to_parent(cluster) <= OUTPUTS:  # TCP carries the chunks until a NIXL process has answered
                generation = ask_long(cluster.omni)
                check_exact(generation, await read_until_first(generation, lambda: None))
    await wait_ended(*(each.pid for each in processes))


@pytest.mark.parametrize("victim", ["a", "b"])
async def test_a_request_goes_on_after_the_death_of_an_agent(
    victim: str, wait_for_processes: Callable[[ClusterOf, int], Awaitable[None]]
) -> None:
    async with open_on_nodes(large_answers(), NODES, lease_s=60, transport="nixl") as cluster:
        check_exact(generation := ask_long(cluster.omni), await read_until_first(generation, lambda: None))
        generation = ask_long(cluster.omni)
        agent = cluster.agents.pids[victim]
        (process,) = nixl_processes_of(agent)
        check_exact(generation, await read_until_first(generation, lambda: os.kill(agent, signal.SIGKILL)))
        await wait_restarted(cluster.omni, {"a": "first", "b": "second"}[victim], 2)
        await wait_ended(process.pid)
        await wait_for_processes(cluster, 3)


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_a_request_goes_on_after_the_death_of_a_nixl_process(
    number: int, wait_for_processes: Callable[[ClusterOf, int], Awaitable[None]]
) -> None:
    """Its node goes on with TCP."""
    async with open_on_nodes(large_answers(), NODES, lease_s=60, transport="nixl") as cluster:
        victim = nixl_processes(cluster)[number]
        for kills in (True, False):
            generation = ask_long(cluster.omni)
            check_exact(generation, await read_until_first(generation, victim.kill if kills else lambda: None))
        await wait_ended(victim.pid)
        await wait_for_processes(cluster, 2)
