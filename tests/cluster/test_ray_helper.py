"""A helper that ends, or hangs: the next agent gets a new one. A script takes the place of Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import psutil
import pytest
import trio
import trio.testing

from omni_actors import OmniSystem, config
from omni_actors.cluster import on_ray, ray_nodes
from omni_actors.cluster.agent import AgentSettings
from omni_actors.cluster.ray_messages import Failed, Found, News, Obeyed, RayNode, Started
from omni_actors.cluster.ray_nodes import open_ray
from omni_actors.errors import RayUnavailable
from omni_actors.log_events import DevicesAwaited
from tests.support.echo_systems import until

NODE = RayNode(
    node_id="1", name="a", address="127.0.0.1", cpus=1.0, free_cpus=1.0, gpus=0, free_gpus=0, labels=(), is_parents=True
)
ADDRESS = "10.0.0.1:6379"
WATCHDOG_S = 30


class ScriptedHelper:
    """A script of the shell that is started in place of the helper."""

    def __init__(self, folder: Path) -> None:
        self.path, self._starts = folder / "helper", folder / "starts"

    def write(self, *lines: str) -> None:
        """Let the next helper carry out these lines."""
        self.path.write_text("\n".join(["#!/bin/sh", f"echo $$ >>'{self._starts}'", *lines]) + "\n")
        self.path.chmod(0o755)

    @property
    def pids(self) -> list[int]:
        """The helpers that were started."""
        return [int(pid) for pid in self._starts.read_text().split()]


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedHelper:
    made = ScriptedHelper(tmp_path)
    monkeypatch.setattr(sys, "executable", str(made.path))
    return made


def say(news: News) -> str:
    """Return the line of a script that tells the parent something."""
    return f"echo '{msgspec.json.encode(news).decode()}'"


def settings(number: int) -> AgentSettings:
    return AgentSettings(number=number, parent=("127.0.0.1", 1), secret=bytes(32), lease_s=1.0)


async def test_a_helper_that_ends_at_once_is_replaced(helper: ScriptedHelper) -> None:
    helper.write(say(Started([NODE])))
    with trio.fail_after(WATCHDOG_S):
        async with open_ray(ADDRESS) as ray:
            assert [node.name for node in ray.nodes] == ["a"]
            while len(helper.pids) < 3:
                await trio.sleep(0.01)
                await ray.connect()


async def test_a_helper_that_carries_out_no_order_is_killed_and_replaced(
    helper: ScriptedHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper.write(say(Started([NODE])), "exec sleep 1000")
    monkeypatch.setattr(ray_nodes, "ORDER_S", 0.2)
    monkeypatch.setattr(ray_nodes, "END_S", 0.2)
    with trio.fail_after(WATCHDOG_S):
        async with open_ray(ADDRESS) as ray:
            for number in (1, 2):
                end = await ray.run("a", settings(number))
                assert not end.certain
                assert "within 0.2 s" in end.why
    assert len(helper.pids) == 2
    assert not any(map(psutil.pid_exists, helper.pids))


async def test_an_order_that_ray_refuses_ends_that_agent_alone(helper: ScriptedHelper) -> None:
    why = "RaySystemError: no control store"
    helper.write(say(Started([NODE])), f"while read order; do {say(Obeyed(why))}; done")
    with trio.fail_after(WATCHDOG_S):
        async with open_ray(ADDRESS) as ray:
            for number in (1, 2):
                assert await ray.run("a", settings(number)) == (False, why)
    assert len(helper.pids) == 1


async def test_a_helper_that_finds_fewer_nodes_takes_none_away(helper: ScriptedHelper) -> None:
    """A new head has only its own node at first; the others come later, and are still the nodes of the cluster."""
    later = msgspec.structs.replace(NODE, node_id="2", name="b", is_parents=False)
    helper.write(say(Started([NODE, later])))
    with trio.fail_after(WATCHDOG_S):
        async with open_ray(ADDRESS) as ray:
            helper.write(say(Started([NODE])))
            while len(helper.pids) < 2:
                await trio.sleep(0.01)
                await ray.connect()
            assert [node.name for node in ray.nodes] == ["a", "b"]


async def test_a_node_that_joins_later_is_taken_in_and_one_that_has_left_is_reported(
    helper: ScriptedHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_nodes, "GONE_S", 0.0)
    first = msgspec.structs.replace(NODE, node_id="2", name="b", is_parents=False)
    later = msgspec.structs.replace(first, node_id="3", address="127.0.0.2")
    helper.write(say(Started([NODE, first])), "read end", say(Found([NODE, later])), "read end")
    send, receive = trio.open_memory_channel[list[str]](1)
    with trio.fail_after(WATCHDOG_S):
        async with open_ray(ADDRESS) as ray:
            ray.on_found = lambda gone: send.send_nowait(list(gone))
            assert ray._process is not None
            assert ray._process.stdin is not None
            await ray._process.stdin.send_all(b"\n")
            gone = await receive.receive()
            assert {node.name: node.node_id for node in ray.nodes} == {"a": "1", "b": "2", "b-2": "3"}
            assert "b" in gone
            ray.forget("b")
            assert [node.name for node in ray.nodes] == ["a", "b-2"]


async def test_an_agent_is_not_started_on_a_node_that_is_forgotten_while_its_helper_is_started(
    helper: ScriptedHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_nodes, "GONE_S", 0.0)
    first = msgspec.structs.replace(NODE, node_id="2", name="b", is_parents=False)
    helper.write(say(Started([NODE, first])))  # it ends at once
    with trio.fail_after(WATCHDOG_S):
        async with open_ray(ADDRESS) as ray:
            ray.on_found = lambda gone: [ray.forget(name) for name in gone if name == "b"]
            await until(lambda: ray._process is None)
            helper.write(say(Found([NODE])), say(Started([NODE])), "read end")
            assert await ray.run("b", settings(1)) == (False, "its node has left Ray")
            assert [node.name for node in ray.nodes] == ["a"]


async def test_a_helper_that_has_ended_is_replaced_so_that_later_nodes_are_seen(
    helper: ScriptedHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_nodes, "RECONNECT_S", 0.01)
    later = msgspec.structs.replace(NODE, node_id="2", name="later", address="10.0.0.2", is_parents=False)
    helper.write(say(Started([NODE])), "read end")
    with trio.fail_after(WATCHDOG_S):
        async with open_ray(ADDRESS) as ray:
            helper.write(say(Started([NODE, later])), "read end")
            os.kill(helper.pids[0], signal.SIGKILL)
            await until(lambda: len(ray.nodes) == 2)
            assert [node.name for node in ray.nodes] == ["a", "later"]


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("can't start new thread")])
async def test_a_helper_that_cannot_be_started_for_now_is_tried_again(
    helper: ScriptedHelper, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(ray_nodes, "RECONNECT_S", 0.01)
    tries = []

    async def fails(*command: object, **options: object) -> None:
        tries.append(command)
        raise error

    helper.write(say(Started([NODE])), "read end")
    with trio.fail_after(WATCHDOG_S):
        async with open_ray(ADDRESS) as ray:
            with monkeypatch.context() as patched:
                patched.setattr("trio.lowlevel.open_process", fails)
                os.kill(helper.pids[0], signal.SIGKILL)
                await until(lambda: len(tries) > 1)
                end = await ray.run("a", settings(1))
                assert not end.certain
                assert end.why.endswith(f"its helper cannot be started: {error}")
            await until(lambda: len(helper.pids) == 2)


@pytest.mark.parametrize("freed", [True, False])
async def test_opening_waits_for_devices_that_another_system_holds_and_no_longer_than_it_may(
    helper: ScriptedHelper, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, freed: bool
) -> None:
    monkeypatch.setattr(on_ray, "LOOK_S", 0.01)
    if not freed:
        monkeypatch.setattr(on_ray, "HELD_S", 0.1)
    pipeline = config.load("echo", {"stages.first.device": "cuda", "cluster": {"nodes": {"first": "g"}}})
    held = msgspec.structs.replace(NODE, node_id="2", name="g", gpus=1, is_parents=False)
    looks = say(Found([NODE, held]))  # told again and again
    waits = f"read order; {say(Found([NODE, held], agents=['2']))}; {looks}; {say(Obeyed())}"
    ended = (
        f"read order; {say(Found([NODE, held], agents=[]))}; {say(Obeyed())}"  # Ray says a moment later what is free
    )
    free = f"read order; {say(Found([NODE, msgspec.structs.replace(held, free_gpus=1)]))}; {say(Obeyed())}"
    helper.write(say(Started([NODE, held])), *([waits, ended, free] if freed else [f"while {waits}; do true; done"]))
    with trio.fail_after(WATCHDOG_S):
        async with open_ray(ADDRESS) as ray:
            await on_ray._wait_for_devices(pipeline, ray, parents_too=False)
            assert {node.name: node.free_gpus for node in ray.nodes}["g"] == freed
    events = [event for each in caplog.records if isinstance(event := each.__dict__.get("event"), DevicesAwaited)]
    assert [event.nodes for event in events] == [("g",)]


async def test_a_helper_that_says_what_cannot_be_read_is_killed_and_replaced(helper: ScriptedHelper) -> None:
    helper.write(say(Started([NODE])), "read order", "echo oops", "exec sleep 1000")
    with trio.fail_after(WATCHDOG_S):
        async with open_ray(ADDRESS) as ray:
            for number in (1, 2):
                assert await ray.run("a", settings(number)) == (False, "the helper that uses Ray has ended")
    assert len(helper.pids) == 2
    assert not any(map(psutil.pid_exists, helper.pids))


async def test_a_helper_whose_first_words_cannot_be_read_is_an_error(helper: ScriptedHelper) -> None:
    helper.write("echo oops", "exec sleep 1000")
    with trio.fail_after(WATCHDOG_S), pytest.raises(RayUnavailable, match="the helper says what cannot be read"):
        async with open_ray(ADDRESS):
            pytest.fail("the block began")


async def test_no_node_has_the_name_of_the_parents_label(helper: ScriptedHelper) -> None:
    named = [msgspec.structs.replace(NODE, node_id=name, name=name) for name in ("a", "parent", "parent-2")]
    helper.write(say(Started(named)), "read end")
    with trio.fail_after(WATCHDOG_S):
        async with open_ray(ADDRESS) as ray:
            assert {node.name: node.node_id for node in ray.nodes} == {
                "a": "a",
                "parent-2": "parent",
                "parent-2-2": "parent-2",
            }


async def test_a_cluster_without_a_node_here_is_an_error(helper: ScriptedHelper) -> None:
    helper.write(say(Started([msgspec.structs.replace(NODE, is_parents=False)])), "read end")
    with trio.fail_after(WATCHDOG_S), pytest.raises(RayUnavailable, match="not one of its nodes") as caught:
        async with OmniSystem.open("echo", cluster=ADDRESS):
            pytest.fail("the block began")
    assert caught.value.address == ADDRESS


async def test_the_helper_outlives_a_cancelled_block(helper: ScriptedHelper) -> None:
    """So that agents that are killed when the block ends are killed by it."""
    helper.write(say(Started([NODE])), f"while read order; do {say(Obeyed('as asked'))}; done")
    ends = []
    with trio.fail_after(WATCHDOG_S), trio.CancelScope() as scope:
        async with open_ray(ADDRESS) as ray:
            scope.cancel()
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await trio.testing.wait_all_tasks_blocked()
                    ends.append(await ray.run("a", settings(1)))
    assert ends == [(False, "as asked")]


@pytest.mark.parametrize("address", ["", "10.0.0.1", "10.0.0.1:abc", "ray://10.0.0.1:10001", "::1:6379", "10.0.0.1:"])
async def test_what_is_no_address_of_a_cluster_is_reported(address: str) -> None:
    with pytest.raises(RayUnavailable, match="accepted: HOST:PORT") as caught:
        async with open_ray(address):
            pytest.fail("the block began")
    assert caught.value.address == address


async def test_a_machine_without_ray_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RayUnavailable, match=r"not installed \(pip install '\.\[cluster\]' in the clone\)"):
        async with open_ray("auto"):
            pytest.fail("the block began")


def test_a_machine_on_which_no_ray_runs_is_reported(tmp_path: Path) -> None:
    """Ray looks for one among the processes, here among none, and in a file."""
    program = """
        import sys
        from omni_actors.cluster import ray_helper
        from ray._private import services
        services.psutil.process_iter = lambda *attributes, **named: iter(())
        sys.argv[1:] = ["auto"]
        ray_helper.main()
    """
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**environment, "RAY_TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=WATCHDOG_S,
    )
    assert msgspec.json.decode(ran.stdout, type=News) == Failed('no Ray runs on this machine; "local" starts one')


def test_what_is_free_on_a_node_is_never_negative() -> None:
    """Ray refuses an actor with a negative number of CPUs."""
    program = """
        import types
        import ray
        from omni_actors.cluster import ray_helper
        resources = {"CPU": 2.0, "GPU": 1.0}
        node = {"NodeID": "1", "NodeManagerAddress": "10.0.0.1", "Alive": True, "Resources": resources}
        ray.nodes = lambda: [node]
        ray.get_runtime_context = lambda: types.SimpleNamespace(get_node_id=lambda: "1")
        ray_helper.available_resources_per_node = lambda: {"1": {"CPU": -1.0, "GPU": -1.0}}
        [found] = object.__new__(ray_helper.Helper).nodes()
        print(found.free_cpus, found.free_gpus)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=WATCHDOG_S
    )
    assert ran.stdout.split() == ["0.0", "0"], ran.stderr


def test_an_agent_that_ends_after_the_helper_has_left_ray_starts_no_other_ray(tmp_path: Path) -> None:
    program = """
        import ray
        from omni_actors.cluster import ray_helper
        init, ray.init = ray.init, lambda **options: None
        helper = ray_helper.Helper("auto")
        ray.init = init
        helper._kill(None)
    """
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**environment, "TMPDIR": str(tmp_path), "RAY_TMPDIR": str(tmp_path)},
        capture_output=True,
        timeout=WATCHDOG_S,
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert not list(tmp_path.iterdir())
