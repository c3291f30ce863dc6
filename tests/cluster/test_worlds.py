"""The worlds of ``--world``: the workers of an unchanged test really run on other nodes, and its edges are links."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil
import pytest
import trio
import trio.testing

from omni_actors import OmniSystem
from omni_actors.cluster import spawner
from omni_actors.cluster.remote_checkpoints import RemoteCheckpoints
from omni_actors.cluster.spawner import ClusterSpawner
from ringbuf import RingCorrupted, Snapshot
from tests.cluster.long_answers import ask_long, check_exact, long_answers
from tests.support.echo_systems import pid_of, read
from tests.support.worlds import in_world


async def test_every_worker_runs_under_an_agent_and_every_edge_is_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[ClusterSpawner] = []
    run = ClusterSpawner.run

    async def recorded(self: ClusterSpawner, *, task_status: trio.TaskStatus[None]) -> None:
        opened.append(self)
        await run(self, task_status=task_status)

    monkeypatch.setattr(spawner.ClusterSpawner, "run", recorded)
    with in_world("agents"):
        async with OmniSystem.open(long_answers()) as omni:
            [cluster] = opened
            agents = {agent.pid: node for node, agent in cluster.agents.items()}
            assert len(agents) == 2
            assert os.getpid() not in agents
            workers = {stage: psutil.Process(pid_of(omni, stage)) for stage in ("first", "second")}
            nodes = {stage: agents[worker.ppid()] for stage, worker in workers.items()}
            assert nodes == {"first": "n1", "second": "n2"}
            check_exact(generation := ask_long(omni), await read(generation))
            assert len(omni._edges.statistics()) == len(cluster._links) == 4  # three of them join the client


async def test_a_worker_has_what_tests_set_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine_of_this_test.py").write_text(
        "import os\n"
        "from omni_actors.stages.echo.engine import EchoEngine\n"
        "class Engine(EchoEngine):\n"
        "    def step(self):\n"
        "        for output in super().step():\n"
        "            output.data['word'] = os.environ['WORD_OF_THIS_TEST']\n"
        "            yield output\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("WORD_OF_THIS_TEST", "hello")
    with in_world("agents"):
        async with OmniSystem.open("echo", overrides={"stages.first.engine": "engine_of_this_test:Engine"}) as omni:
            outputs = [output async for output in omni.generate("x")]
    assert outputs[0].data["word"] == "hello"


async def test_a_memory_is_dropped_when_its_proxy_is_closed(autojump_clock: trio.testing.MockClock) -> None:
    dropped: list[int] = []
    checkpoints = RemoteCheckpoints(dropped.append)
    async with trio.open_nursery() as nursery:
        proxies = {memory: checkpoints.proxy(memory, nursery) for memory in (1, 2)}
        assert [checkpoints.memory_of(proxy) for proxy in proxies.values()] == [1, 2]
        copy = os.dup(proxies[1])  # a descriptor that the supervisor has passed on
        assert checkpoints.memory_of(copy) == 1
        os.close(proxies[1])
        await trio.testing.wait_all_tasks_blocked()
        assert dropped == []
        os.close(copy)
        await trio.testing.wait_all_tasks_blocked()
        assert dropped == [1]
        assert checkpoints.memory_of(proxies[2]) == 2
        with socket.socket() as another:
            assert checkpoints.memory_of(another.fileno()) is None
        os.close(proxies[2])
    assert dropped == [1, 2]


async def test_a_proxy_is_no_checkpoint_for_a_worker_on_another_node(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        proxy = RemoteCheckpoints(lambda memory: None).proxy(1, nursery)
        with pytest.raises((RingCorrupted, OSError)):
            Snapshot.attach(proxy)  # which closes it
