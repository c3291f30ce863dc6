"""Systems on several nodes: real agents, workers, links and signals, on this machine."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import textwrap
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest
import trio

from omni_actors import OmniSystem
from omni_actors.cluster.agent import AgentSettings
from omni_actors.cluster.spawner import MOST_STRANGERS, open_cluster
from omni_actors.cluster.subprocess_agents import SubprocessAgents
from omni_actors.config import Pipeline, Stage
from omni_actors.errors import ClusterUnavailable, StageCrashed
from omni_actors.generation import Generation
from omni_actors.orchestrator.pieces import Input
from omni_actors.outputs import Output
from omni_actors.stages.echo.engine import payload
from tests.cluster.subprocess_cluster import open_on_nodes
from tests.support.echo_systems import OFTEN, WATCHDOG_S, ask, pid_of, read, until, wait_restarted

LAYOUTS = {
    "two nodes": {"first": "a", "second": "b"},
    "one node": {"first": "a", "second": "a"},
    "parent and node": {"first": "parent", "second": "b"},
    "node and parent": {"first": "a", "second": "parent"},
}
LEASE_S = 2.0
OUTPUTS, PAYLOAD_BYTES = 60, 20_000

WRITER = """
    import os, time
    from omni_actors.stages.echo.engine import EchoEngine

    class Writing(EchoEngine):
        '''Logs each step: its stage, its process and the machine's time.'''

        def step(self):
            with open(os.environ["WRITERS"], "a") as log:
                log.write(f"{self._stage} {os.getpid()} {time.clock_gettime_ns(time.CLOCK_BOOTTIME)}\\n")
            yield from super().step()
"""


def long_answers(engine: str = "echo") -> Pipeline:
    """Each request has ``OUTPUTS`` outputs with a payload, one every 10 ms."""
    options = {"step_s": 0.01, "fan_out": OUTPUTS, "payload_bytes": PAYLOAD_BYTES}
    both = {"restart": OFTEN, "ring_bytes": 65536, "deterministic": True, "load_timeout_s": 60.0}
    first = Stage(engine=engine, accepts=("script",), emits="text", options=options, **both)
    second = Stage(engine=engine, inputs=("first",), emits="audio", options={"payload_bytes": PAYLOAD_BYTES}, **both)
    return Pipeline(name="nodes", stages={"first": first, "second": second})


@pytest.fixture
def writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of the engine ``writing_engines:Writing``, in every process."""
    (tmp_path / "writing_engines.py").write_text(textwrap.dedent(WRITER))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("WRITERS", str(tmp_path / "log"))
    return tmp_path / "log"


def assert_one_writer_at_a_time(log: Path) -> int:
    """Check that no two processes of a stage wrote in the same time. Return how many processes wrote."""
    times: dict[tuple[str, int], list[int]] = {}
    for line in log.read_text().splitlines():
        stage, pid, at = line.split()
        times.setdefault((stage, int(pid)), []).append(int(at))
    for stage in {stage for stage, _ in times}:
        spans = sorted((min(each), max(each)) for (name, _), each in times.items() if name == stage)
        assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(spans)), (stage, spans)
    return len(times)


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended. Its parent has ended, too, so it may wait for long to be reaped."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def ask_long(omni: OmniSystem) -> Generation:
    return omni.submit({"script": [Input({"text": "x"})]}, ("text", "audio"))


def check_exact(generation: Generation, outputs: list[Output], count: int = OUTPUTS) -> None:
    """The client got each output of each stage once, whole and in order."""
    number = generation.stream.request.number
    assert number is not None
    for stage in ("first", "second"):
        mine = [output for output in outputs if output.stage == stage]
        assert [output.finished for output in mine] == [False] * (count - 1) + [True]
        for seq, output in enumerate(mine):
            assert np.array_equal(output.tensors["payload"].numpy(), payload(number, seq, PAYLOAD_BYTES))


async def read_until_first(generation: Generation, then: Callable[[], None]) -> list[Output]:
    """Read all outputs, and call ``then`` when the first has arrived."""
    outputs: list[Output] = []
    with trio.fail_after(WATCHDOG_S):
        async for output in generation:
            if not outputs:
                then()
            outputs.append(output)
    return outputs


@pytest.mark.parametrize(
    "layout", ["two nodes", *(pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS if each != "two nodes")]
)
async def test_answers_cross_nodes_whole_and_in_order(layout: str) -> None:
    async with open_on_nodes(long_answers(), LAYOUTS[layout], lease_s=LEASE_S) as cluster:
        omni = cluster.omni
        generations = [ask_long(omni) for _ in range(4)]
        for generation in generations:
            check_exact(generation, await read(generation))
        assert len(omni._edges.statistics()) == 4
        # The counters of rings between workers come with the next renewal of the lease.
        await until(lambda: all(ring.messages >= 4 for ring in omni._edges.statistics().values()))


@pytest.mark.slow
async def test_a_request_goes_on_after_the_death_of_a_worker_on_another_node(writers: Path) -> None:
    async with open_on_nodes(long_answers("writing_engines:Writing"), LAYOUTS["two nodes"]) as cluster:
        for stage in ("first", "second"):
            generation, pid = ask_long(cluster.omni), pid_of(cluster.omni, stage)
            outputs = await read_until_first(generation, lambda pid=pid: os.kill(pid, signal.SIGKILL))
            check_exact(generation, outputs)
            await wait_restarted(cluster.omni, stage, 2)
        [death] = cluster.omni.health().stages["first"][0].history
        assert death.signal == "SIGKILL"
        assert assert_one_writer_at_a_time(writers) == 4


@pytest.mark.parametrize("node", ["a", pytest.param("b", marks=pytest.mark.slow)])
async def test_a_request_goes_on_after_the_death_of_an_agent(writers: Path, node: str) -> None:
    """Its workers die with it. The process is a child of this one, so its end is certain and no lease is waited for."""
    async with open_on_nodes(long_answers("writing_engines:Writing"), LAYOUTS["two nodes"], lease_s=60) as cluster:
        stage = {"a": "first", "b": "second"}[node]
        worker = psutil.Process(pid_of(cluster.omni, stage))
        generation = ask_long(cluster.omni)
        outputs = await read_until_first(generation, lambda: os.kill(cluster.agents.pids[node], signal.SIGKILL))
        check_exact(generation, outputs)
        assert has_ended(worker)
        await wait_restarted(cluster.omni, stage, 2)
        [death] = cluster.omni.health().stages[stage][0].history
        assert death.reason is not None
        assert f"NodeLost: {node}" in death.reason
        assert_one_writer_at_a_time(writers)


async def test_the_workers_of_a_node_that_stands_still_end_before_their_successors_start(writers: Path) -> None:
    """SIGSTOP of the agent alone: its worker goes on, as it does on a node that cannot be reached."""
    pipeline = long_answers("writing_engines:Writing")
    async with open_on_nodes(pipeline, LAYOUTS["two nodes"], lease_s=LEASE_S) as cluster:
        omni, worker = cluster.omni, psutil.Process(pid_of(cluster.omni, "first"))
        generation = ask_long(omni)
        outputs = await read_until_first(generation, lambda: os.kill(cluster.agents.pids["a"], signal.SIGSTOP))
        check_exact(generation, outputs)
        await wait_restarted(omni, "first", 2)
        assert has_ended(worker)
        check_exact(after := ask_long(omni), await read(after))
        assert assert_one_writer_at_a_time(writers) == 3  # the other stage has one


async def test_without_replay_a_lost_node_ends_the_request_with_the_facts() -> None:
    async with open_on_nodes(long_answers(), LAYOUTS["two nodes"]) as cluster:
        hanging = ask(cluster.omni, stage="second", hang=True)
        await until(lambda: hanging.stream.request.number is not None)
        os.kill(cluster.agents.pids["b"], signal.SIGKILL)
        with pytest.raises(StageCrashed, match="NodeLost: b"):
            await read(hanging)


async def test_a_worker_that_hangs_on_another_node_is_killed_and_its_stderr_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "omni_actors.worker")
    async with open_on_nodes(long_answers(), LAYOUTS["one node"]) as cluster:
        dying = ask(cluster.omni, stage="first", stderr="out of luck", exit=3)
        with pytest.raises(StageCrashed) as caught:
            await read(dying)
        assert caught.value.exit_code == 3
        assert "out of luck" in caught.value.stderr_tail[-1]
        assert "out of luck" in caplog.text


@pytest.mark.slow
async def test_strangers_are_refused_and_do_not_keep_an_agent_out() -> None:
    async with open_on_nodes(long_answers(), LAYOUTS["two nodes"]) as cluster, AsyncExitStack() as strangers:
        address = cluster.spawner.address
        for n in range(MOST_STRANGERS + 8):
            stream = await strangers.enter_async_context(await trio.open_tcp_stream(*address))
            if n % 2:
                await stream.send_all(b"GET / HTTP/1.1\r\n\r\n".ljust(56, b"\n"))
        os.kill(cluster.agents.pids["a"], signal.SIGKILL)
        await wait_restarted(cluster.omni, "first", 2)
        check_exact(after := ask_long(cluster.omni), await read(after))


async def test_an_agent_that_cannot_start_is_reported_with_its_node() -> None:
    agents = SubprocessAgents({"b": [sys.executable, "-c", "import sys; sys.exit(1)"]})
    with pytest.raises(ClusterUnavailable, match=r"'b'.*has ended") as caught:
        async with open_cluster(["a", "b"], agents, lambda _: "a"):
            pytest.fail("the block began")
    assert list(caught.value.nodes) == ["b"]


@pytest.mark.slow
async def test_an_agent_ends_without_a_parent(tmp_path: Path) -> None:
    """Its connection is accepted and nothing answers: the agent ends by itself."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = AgentSettings(number=1, parent=listener.getsockname(), secret=bytes(32), lease_s=0.1)
        with trio.fail_after(WATCHDOG_S):
            assert await SubprocessAgents().run("a", settings)
