"""Systems on the nodes of a Ray cluster, which the tests start on this machine, and the deaths of its parts."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

import msgspec
import psutil
import pytest
import trio

from omni_actors import OmniSystem
from omni_actors.cluster import ray_nodes
from omni_actors.cluster.agent import AgentSettings
from omni_actors.cluster.interfaces import AgentEnd
from omni_actors.cluster.placement import PARENT, Node
from omni_actors.cluster.ray_nodes import RayAgents, open_ray
from omni_actors.cluster.spawner import ClusterSpawner, open_cluster
from omni_actors.config import Cluster, Pipeline, Stage
from omni_actors.config.schema import Autoscale
from omni_actors.errors import ClusterUnavailable, NoPlace, RayUnavailable
from omni_actors.stress import cuts
from omni_actors.worker.priority import may_raise_to
from tests.cluster.long_answers import (
    ask_long,
    assert_one_writer_at_a_time,
    check_exact,
    has_ended,
    long_answers,
    read_until_first,
    wait_ended,
)
from tests.cluster.ray_cluster import RayCluster, ray_cluster
from tests.cluster.subprocess_cluster import FixedPlaces
from tests.support.echo_systems import generation_of, pid_of, read, until, wait_restarted

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
LEASE_S = 6.0
WATCHDOG_S = 90.0
MONITORED_S = 5.0
"""Ray looks at the memory four times a second, unless it is told not to."""
NODES: dict[str, str | Sequence[str]] = {"first": ("n1", "n2"), "second": ("n2", "n1")}


@pytest.fixture
def writers(tmp_path: Path) -> Path:
    """Where the workers log their lives."""
    return tmp_path / "writers"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster("n1", "n2") as started:
        yield started


@pytest.fixture
def mortal_cluster() -> Iterator[RayCluster]:
    """A cluster of the test's own, parts of which it may kill."""
    with ray_cluster("n1", "n2") as started:
        yield started


@pytest.fixture(autouse=True)
def _rays_own_processes(fixture_processes: set[int]) -> Iterator[None]:
    """Ray keeps processes for later actors. They belong to the cluster, and not to the test that was first."""
    yield
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith("ray::") or "default_worker.py" in " ".join(process.cmdline()):
                fixture_processes.add(process.pid)


class OnRay(NamedTuple):
    """A system, its spawner, and what started its agents."""

    omni: OmniSystem
    spawner: ClusterSpawner
    ray: RayAgents


@asynccontextmanager
async def open_on_ray(cluster: RayCluster, writers: Path | None = None, cpus: float = 0.0) -> AsyncIterator[OnRay]:
    """Open the pipeline of ``long_answers`` on "n1" and "n2". cpus: what each agent reserves; a node has 2."""
    async with open_ray(cluster.address) as ray:
        ray.resources = lambda node: (cpus, 0.0)
        host = next(node.address for node in ray.nodes if node.is_parents)
        nodes = [Node(name=PARENT), Node(name="n1"), Node(name="n2")]
        async with (
            open_cluster(nodes, ray, FixedPlaces(NODES), host=host, lease_s=LEASE_S) as spawner,
            OmniSystem.open(long_answers(writers), spawner=spawner) as omni,
        ):
            yield OnRay(omni, spawner, ray)


async def test_answers_are_whole_and_no_agent_is_left(cluster: RayCluster) -> None:
    async with open_on_ray(cluster) as on:
        agents = [psutil.Process(agent.pid) for agent in on.spawner.agents.values()]
        workers = [psutil.Process(pid_of(on.omni, stage)) for stage in ("first", "second")]
        assert [worker.ppid() for worker in workers] == [agent.pid for agent in agents]
        assert [agent.ppid() for agent in agents] == [cluster.raylets["n1"], cluster.raylets["n2"]]
        generations = [ask_long(on.omni) for _ in range(4)]
        for generation in generations:
            check_exact(generation, await read(generation))
    assert all(map(has_ended, workers))
    await wait_ended(*(agent.pid for agent in agents))


@pytest.mark.usefixtures("needs_cuts")
async def test_an_agent_without_its_connection_gives_its_resources_to_the_next_one(cluster: RayCluster) -> None:
    async with open_on_ray(cluster, cpus=2.0) as on:
        for _ in range(2):
            agent = on.spawner.agents["n1"]
            assert cuts.cut(agent.pid, lambda each: each.remote_port == on.spawner.address[1]) == 1
            await until(
                lambda lost=agent: on.spawner.agents["n1"] is not lost and on.spawner.nodes()["n1"].state == "alive"
            )
        check_exact(after := ask_long(on.omni), await read(after))
    async with open_ray(cluster.address) as ray:
        await until(lambda: all(node.free_cpus == node.cpus == 2.0 for node in ray.nodes))


async def test_agents_and_workers_have_no_lower_priority_than_other_programs(cluster: RayCluster) -> None:
    """Ray starts its actors with a nice value of 15."""
    async with open_on_ray(cluster) as on:
        started = [agent.pid for agent in on.spawner.agents.values()] + [pid_of(on.omni, stage) for stage in NODES]
        assert {psutil.Process(pid).nice() for pid in started} == {0 if may_raise_to(0) else 15}


async def test_no_actor_is_left_of_a_helper_that_was_killed(cluster: RayCluster) -> None:
    async with open_on_ray(cluster, cpus=2.0) as on:
        actors = [agent.pid for agent in on.spawner.agents.values()]
        assert on.ray._process is not None
        on.ray._process.kill()
        check_exact(after := ask_long(on.omni), await read(after))
    await wait_ended(*actors)


async def test_a_system_is_opened_by_the_address_of_a_cluster(cluster: RayCluster) -> None:
    nodes = {"first": "n1", "second": "n2"}
    async with OmniSystem.open("echo", cluster=cluster.address, overrides={"cluster": {"nodes": nodes}}) as omni:
        agents = {stage: psutil.Process(pid_of(omni, stage)).ppid() for stage in nodes}
        raylets = {nodes[stage]: psutil.Process(agent).ppid() for stage, agent in agents.items()}
        assert raylets == {node: cluster.raylets[node] for node in nodes.values()}
        outputs = [output async for output in omni.generate("hello")]
        assert outputs[0].delta == "hello"
    await wait_ended(*agents.values())


async def test_a_worker_without_a_place_is_reported_before_anything_runs(cluster: RayCluster) -> None:
    with pytest.raises(NoPlace, match="moon"):
        async with OmniSystem.open(
            "echo", cluster=cluster.address, overrides={"cluster": {"nodes": {"first": "moon"}}}
        ):
            pytest.fail("the block began")


async def test_a_system_starts_without_a_node_where_ray_starts_no_agent(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RayAgents.run

    async def refused(self: RayAgents, node: str, settings: AgentSettings) -> AgentEnd:
        return AgentEnd(False, "no actor") if node == "n2" else await run(self, node, settings)

    monkeypatch.setattr(RayAgents, "run", refused)
    placed = {"cluster": {"nodes": {"first": "n1"}}}
    async with OmniSystem.open("echo", cluster=cluster.address, overrides=placed) as omni:
        assert omni.health().nodes["n2"].why == "its agent cannot be started: no actor"
        outputs = [output async for output in omni.generate("hello")]
        assert outputs[0].delta == "hello"
    placed = {"cluster": {"nodes": {"first": "n2"}}}
    with pytest.raises(ClusterUnavailable, match=r"'n2' cannot be used: .*no actor"):
        async with OmniSystem.open("echo", cluster=cluster.address, overrides=placed):
            pytest.fail("the block began")


@pytest.mark.parametrize(("node", "stage"), [("n1", "first"), ("n2", "second")])
async def test_a_request_goes_on_after_the_death_of_an_agent(
    cluster: RayCluster, writers: Path, node: str, stage: str
) -> None:
    async with open_on_ray(cluster, writers) as on:
        generation, agent = ask_long(on.omni), on.spawner.agents[node]
        outputs = await read_until_first(generation, lambda: os.kill(agent.pid, signal.SIGKILL))
        check_exact(generation, outputs)
        await wait_restarted(on.omni, stage, 2)
        await until(lambda: on.spawner.agents[node] is not agent and on.spawner.agents[node].up.is_set())
        assert on.spawner.agents[node].lost is None
        assert_one_writer_at_a_time(writers)


async def test_the_workers_of_a_node_without_its_raylet_move_to_another_node(
    mortal_cluster: RayCluster, writers: Path
) -> None:
    async with open_on_ray(mortal_cluster, writers) as on:
        generation = ask_long(on.omni)
        outputs = await read_until_first(generation, lambda: os.kill(mortal_cluster.raylets["n2"], signal.SIGKILL))
        check_exact(generation, outputs)
        await wait_restarted(on.omni, "second", 2)
        worker = psutil.Process(pid_of(on.omni, "second"))
        assert worker.ppid() == on.spawner.agents["n1"].pid
        check_exact(after := ask_long(on.omni), await read(after))
        assert_one_writer_at_a_time(writers)


async def test_a_node_that_joins_later_takes_the_place_of_one_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Kubernetes, where a pod that is replaced gets another name and another address."""
    placed = {"cluster": {"nodes": {"first": "role=compute"}, "lease_s": LEASE_S}}
    with ray_cluster("n1") as cluster, trio.fail_after(2 * WATCHDOG_S):
        async with OmniSystem.open("echo", cluster=cluster.address, overrides=placed) as omni:
            assert [each.node for each in omni.health().stages["first"]] == ["n1"]
            os.kill(cluster.raylets["n1"], signal.SIGKILL)
            await until(lambda: omni.health().nodes["n1"].state == "fenced")
            await trio.to_thread.run_sync(cluster.add, "n2")
            outputs = [output async for output in omni.generate("hello")]
            assert outputs[0].delta == "hello"
            assert [each.node for each in omni.health().stages["first"]] == ["n2"]
            assert "n1" in omni.health().nodes
            monkeypatch.setattr(ray_nodes, "GONE_S", 0.0)
            await until(lambda: "n1" not in omni.health().nodes)
            assert omni.health().nodes["n2"].state == "alive"


async def test_a_label_without_a_value_is_a_word(mortal_cluster: RayCluster) -> None:
    mortal_cluster.add("n3", "")
    async with open_ray(mortal_cluster.address) as ray:
        assert {node.name: node.labels for node in ray.nodes} == {
            "head": (),
            "n1": ("role=compute",),
            "n2": ("role=compute",),
            "n3": ("role",),
        }


async def test_a_node_that_comes_back_has_the_labels_that_it_has_then() -> None:
    placed = {"cluster": {"nodes": {"first": "role=compute"}, "lease_s": LEASE_S}}
    with ray_cluster("n1") as cluster, trio.fail_after(2 * WATCHDOG_S):
        async with OmniSystem.open("echo", cluster=cluster.address, overrides=placed) as omni:
            os.kill(cluster.raylets["n1"], signal.SIGKILL)
            await until(lambda: omni.health().nodes["n1"].state == "fenced")
            await trio.to_thread.run_sync(cluster.add, "n1", "other")
            await until(lambda: omni.health().nodes["n1"].state == "alive")
            assert "role=compute" in omni.health().stages["first"][0].note
            await trio.to_thread.run_sync(cluster.add, "n2")
            outputs = [output async for output in omni.generate("hello")]
            assert outputs[0].delta == "hello"
            assert [each.node for each in omni.health().stages["first"]] == ["n2"]


async def test_a_node_that_comes_back_before_it_is_fenced_has_the_labels_that_it_has_then() -> None:
    placed = {"cluster": {"nodes": {"first": "role=compute"}, "lease_s": 20.0}}
    with ray_cluster("n1") as cluster, trio.fail_after(2 * WATCHDOG_S):
        async with OmniSystem.open("echo", cluster=cluster.address, overrides=placed) as omni:
            os.kill(cluster.raylets["n1"], signal.SIGKILL)
            await until(lambda: omni.health().nodes["n1"].state == "lost")
            await trio.to_thread.run_sync(cluster.add, "n1", "other")
            await until(lambda: omni.health().nodes["n1"].state == "alive")
            assert "role=compute" in omni.health().stages["first"][0].note
            await trio.to_thread.run_sync(cluster.add, "n2")
            outputs = [output async for output in omni.generate("hello")]
            assert outputs[0].delta == "hello"
            assert [each.node for each in omni.health().stages["first"]] == ["n2"]


async def test_a_system_goes_on_without_the_head(mortal_cluster: RayCluster) -> None:
    """Rays' nodes wait for their head for a minute. Until they end, all is as before, also for new requests."""
    async with open_on_ray(mortal_cluster) as on:
        generation = ask_long(on.omni)
        outputs = await read_until_first(generation, lambda: os.kill(mortal_cluster.gcs, signal.SIGKILL))
        check_exact(generation, outputs)
        check_exact(after := ask_long(on.omni), await read(after))
        os.kill(pid_of(on.omni, "second"), signal.SIGKILL)
        await wait_restarted(on.omni, "second", 2)
        check_exact(after := ask_long(on.omni), await read(after))
        assert generation_of(on.omni, "first") == 1


def with_devices() -> Pipeline:
    """Two workers on a node "g", each with a device. The devices are claimed: this machine needs none."""
    stage = Stage(
        engine="tests.cluster.device_engine:without_devices",
        accepts=("script",),
        emits="audio",
        device="cuda",
        replicas=2,
        autoscale=Autoscale(max=2),
    )
    return Pipeline(name="devices", stages={"only": stage}, cluster=Cluster(nodes={"only": "g"}))


async def test_workers_get_the_devices_that_ray_gave_their_agent_and_none_of_another_job() -> None:
    pipeline = with_devices()
    with ray_cluster("g:4:1") as cluster:
        async with OmniSystem.open(pipeline, cluster=cluster.address) as omni:
            workers = [psutil.Process(pid_of(omni, "only", replica)) for replica in range(2)]
            found = [worker.environ()["CUDA_VISIBLE_DEVICES"] for worker in workers]
            [taken] = cluster.taken["g"]
            assert len(found) == len({*found, taken}) - 1 == 2
            assert {*found} < {"0", "1", "2", "3"}
        full = msgspec.structs.replace(pipeline.stages["only"], replicas=4, autoscale=None)
        with pytest.raises(NoPlace, match="no devices for another worker"):
            async with OmniSystem.open(
                msgspec.structs.replace(pipeline, stages={"only": full}), cluster=cluster.address
            ):
                pytest.fail("the block began")


SERVER = """
import sys
import trio
from omni_actors import OmniSystem
from tests.cluster.test_ray import with_devices

async def serve():
    async with OmniSystem.open(with_devices(), cluster=sys.argv[1]):
        print("open", flush=True)
        await trio.sleep_forever()

trio.run(serve)
"""


async def test_a_system_gets_the_devices_of_its_predecessor_that_was_killed_with_its_helper() -> None:
    """The agents of the first one end by themselves, some seconds later."""
    with ray_cluster("g:2") as cluster, trio.fail_after(2 * WATCHDOG_S):
        command = [sys.executable, "-c", SERVER, cluster.address]
        process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        with killed_at_the_end(process.pid):
            assert (await process.stdout.receive_some()).startswith(b"open")  # the newline may come later
        await process.stdout.aclose()
        await process.wait()
        async with OmniSystem.open(with_devices(), cluster=cluster.address) as omni:
            workers = [psutil.Process(pid_of(omni, "only", replica)) for replica in range(2)]
            assert {worker.environ()["CUDA_VISIBLE_DEVICES"] for worker in workers} == {"0", "1"}


@contextmanager
def killed_at_the_end(pid: int) -> Iterator[None]:
    """Kill a process and its children, among them its helper, when the block ends."""
    try:
        yield
    finally:
        for each in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


async def test_a_worker_that_waits_gets_a_device_that_another_job_frees() -> None:
    """The agent of its node was started while there was none."""
    stage = Stage(
        engine="tests.cluster.device_engine:without_devices", accepts=("script",), emits="audio", device="cuda"
    )
    placed = Cluster(nodes={"only": "role=compute"}, lease_s=LEASE_S)
    pipeline = Pipeline(name="devices", stages={"only": stage}, cluster=placed)
    with ray_cluster("g1:1", "g2:1:1") as cluster, trio.fail_after(2 * WATCHDOG_S):
        async with OmniSystem.open(pipeline, cluster=cluster.address) as omni:
            assert [each.node for each in omni.health().stages["only"]] == ["g1"]
            assert omni.health().nodes["g2"].state == "alive"
            os.kill(cluster.raylets["g1"], signal.SIGKILL)
            await until(lambda: "g2: it has no devices" in omni.health().stages["only"][0].note)
            await trio.to_thread.run_sync(cluster.free)
            await until(lambda: [each.node for each in omni.health().stages["only"]] == ["g2"] and omni.health().ready)


async def test_an_agent_waits_for_nothing_that_another_job_holds() -> None:
    """CPUs are a preference: it does with fewer. Its GPUs are needed: the reason says how many are free."""
    placed = {"cluster": {"nodes": {"first": "g"}}, "stages.first.threads": 2}
    with ray_cluster("g:2:1:1") as cluster, trio.fail_after(WATCHDOG_S):
        async with OmniSystem.open("echo", cluster=cluster.address, overrides=placed) as omni:
            assert [each.node for each in omni.health().stages["first"]] == ["g"]
            outputs = [output async for output in omni.generate("hello")]
            assert outputs[0].delta == "hello"
        async with open_ray(cluster.address) as ray:
            ray.resources = lambda node: (0.0, 2.0)
            settings = AgentSettings(number=1, parent=("127.0.0.1", 1), secret=bytes(32), lease_s=1.0)
            end = await ray.run("g", settings)
    assert end == (False, "it needs 2 GPUs of its node, and Ray has 1 free there")


async def test_a_ray_that_was_started_here_leaves_no_file_and_has_tls_where_the_pipeline_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = Path(mkdtemp(prefix="r-", dir="/tmp"))  # Ray's sockets need a short path
    monkeypatch.setenv("RAY_TMPDIR", str(directory))
    placed = {
        "cluster": {"spread": ["first"], "nodes": {"second": "role=gpu"}, "tls": True},
        "stages.first.replicas": 2,
    }
    try:
        async with OmniSystem.open("echo", cluster="local", overrides=placed) as omni:
            assert len(files_in(directory)) == 1
            nodes = {each.node for each in omni.health().stages["first"]}
            assert nodes == omni.health().nodes.keys()
            assert len(nodes) == 2
            assert [each.node for each in omni.health().stages["second"]] == [*nodes - {PARENT}], "it has all labels"
            outputs = [output async for output in omni.generate("hello")]
            assert outputs[0].delta == "hello"
            assert isinstance(omni._cluster, ClusterSpawner)
            assert await trio.to_thread.run_sync(certificate_at, omni._cluster.address)
        assert not files_in(directory)
    finally:
        shutil.rmtree(directory)


async def test_a_ray_that_was_started_here_kills_no_agent_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is always short here, by what Ray is told."""
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.0001")
    placed = {"cluster": {"spread": ["first"]}, "stages.first.replicas": 2}
    with trio.fail_after(WATCHDOG_S):
        async with OmniSystem.open("echo", cluster="local", overrides=placed) as omni:
            assert isinstance(omni._cluster, ClusterSpawner)
            [agent] = omni._cluster.agents.values()
            await trio.sleep(MONITORED_S)
            assert (agent.lost, agent.state().state) == (None, "alive")


def files_in(directory: Path) -> list[str]:
    return os.listdir(directory)


def certificate_at(address: tuple[str, int]) -> bytes:
    """Return the certificate of a server, whatever it is."""
    return ssl.get_server_certificate(address).encode()


async def test_an_address_without_a_cluster_is_reported() -> None:
    with pytest.raises(RayUnavailable, match=r"127\.0\.0\.1:9"):
        async with open_ray("127.0.0.1:9"):
            pytest.fail("the block began")
