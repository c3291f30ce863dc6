"""The harness with workers on other nodes: the same schedules and checks, and faults of agents and connections."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from click.testing import CliRunner

from omni_actors.cli import main
from omni_actors.stress import campaign, cuts
from omni_actors.stress.judge import Explanation, ObservedDeath, check_deaths
from omni_actors.stress.nodes import AGENTS
from omni_actors.stress.run import run_schedule
from omni_actors.stress.schedule import (
    CutControl,
    CutLinks,
    FreezeAgent,
    Kill,
    KillAgent,
    Operation,
    Orphan,
    PauseAgent,
    Schedule,
    Settle,
    Submit,
    Wait,
)
from omni_actors.stress.workload import Workload
from tests.cluster.ray_cluster import ray_cluster

FAULTS: dict[str, tuple[Operation, ...]] = {
    "SIGKILL of an agent": (KillAgent(0),),
    "SIGSTOP of an agent": (FreezeAgent(1),),
    "SIGSTOP of an agent, then SIGCONT": (PauseAgent(0, 300),),
    "control connection cut": (CutControl(1),),
    "links into a node cut": (CutLinks(0),),
}


def schedule(*faults: Operation) -> Schedule:
    settled = [each for fault in faults for each in (Submit("audio, long"), Wait(20), fault, Settle())]
    return Schedule("one", None, (Wait(200), *settled))


@pytest.fixture(params=[AGENTS, "ray"], scope="module")
def nodes(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == AGENTS:
        yield AGENTS
        return
    with ray_cluster("n1", "n2") as started:
        yield started.address


@pytest.mark.usefixtures("needs_cuts")
@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_sound_system_passes_and_each_fault_is_counted(baseline: Workload, mark: str, nodes: str) -> None:
    operations = (*(each for some in FAULTS.values() for each in some), Kill(("second",)))
    result = run_schedule(replace(baseline, cluster=nodes), schedule(*operations), mark)
    assert result.found == []
    faults = {fault: row.faults for (fault, _), row in result.rows.items()}
    assert faults == dict.fromkeys([*FAULTS, "SIGKILL"], 1)
    timed = {fault for (fault, _), row in result.rows.items() if row.timings}
    assert timed == faults.keys() - {"SIGSTOP of an agent, then SIGCONT"}


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_nothing_outlives_a_parent_that_is_killed(baseline: Workload, mark: str, nodes: str) -> None:
    operations = (Orphan(loading=False), Orphan(loading=True))
    result = run_schedule(replace(baseline, cluster=nodes), Schedule("idle", None, operations), mark)
    assert result.found == []
    assert result.faults == 2


@pytest.mark.cluster
def test_a_planted_bug_is_found_behind_an_agent(planted: Callable[[str], Workload], mark: str) -> None:
    """The agent of the stage "second" is killed, so that its next worker says other things."""
    operations = (Submit("audio, short"), Settle(), KillAgent(1), Settle(), Submit("audio, short"), Settle())
    result = run_schedule(replace(planted("Louder"), cluster=AGENTS), Schedule("idle", None, operations), mark)
    assert {violation.kind for violation in result.found} == {"corrupted"}


def test_faults_of_nodes_do_nothing_without_nodes(baseline: Workload, mark: str) -> None:
    result = run_schedule(baseline, schedule(*(each for some in FAULTS.values() for each in some)), mark)
    assert (result.found, result.faults) == ([], 0)


def test_a_fault_of_a_node_explains_ends_that_name_it_in_its_time() -> None:
    def death(exit: str, at: float) -> ObservedDeath:
        return ObservedDeath("first", 0, 7, exit, at)

    explanations = [Explanation(("NodeLost: n1",), 10.0, 20.0)]
    fair = death("pid 7 was killed by SIGKILL: NodeLost: n1: its agent has ended", 12.0)
    foreign = [
        death("pid 7 was killed by SIGKILL: NodeLost: n2: its agent has ended", 12.0),
        death("pid 7 was killed by SIGKILL: NodeLost: n1: its agent has ended", 21.0),
        death("pid 7 was killed by SIGKILL", 12.0),
    ]
    found, _ = check_deaths([fair, *foreign], set(), {}, explanations=explanations)
    assert len(found) == len(foreign)


def test_only_the_loss_of_an_agent_explains_a_worker_that_was_not_started() -> None:
    unstarted = ObservedDeath("first", 0, None, "no process was started: the agent has no memory left", 12.0)
    lost, cut = (Explanation(("n1",), 10.0, 20.0, failed_starts=each) for each in (True, False))
    assert check_deaths([unstarted], set(), {}, explanations=[lost])[0] == []
    assert len(check_deaths([unstarted], set(), {}, explanations=[cut])[0]) == 1


@pytest.mark.usefixtures("needs_cuts")
def test_connections_of_another_process_are_cut() -> None:
    """Of two connections of a child, the one that it has accepted is cut."""
    code = (
        "import socket, sys\n"
        "listener = socket.create_server(('127.0.0.1', 0))\n"
        "out = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "print(listener.getsockname()[1], flush=True)\n"
        "accepted, _ = listener.accept()\n"
        "accepted.sendall(b'.')\n"
        "assert accepted.recv(1) == b''\n"
        "assert out.recv(1) == b'x'\n"
    )
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        subprocess.Popen([sys.executable, "-c", code, str(listener.getsockname()[1])], stdout=subprocess.PIPE) as child,
    ):
        other, _ = listener.accept()
        assert child.stdout is not None
        with other, socket.create_connection(("127.0.0.1", int(child.stdout.readline()))) as connection:
            assert connection.recv(1) == b"."
            assert cuts.cut(child.pid, cuts.accepted(child.pid)) == 1
            assert connection.recv(1) == b""
            other.sendall(b"x")
            assert child.wait() == 0


@pytest.mark.cluster
def test_a_violation_gives_a_command_that_repeats_it_on_nodes(
    planted: Callable[[str], Workload], baseline: Workload, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    def known(workload: Workload) -> None:
        workload.oracle = baseline.oracle

    monkeypatch.setattr(campaign, "ask_oracle", known)
    options = dict(planted("Louder").pipeline.stages["second"].options)
    overrides = [
        "--set=stages.second.engine=planted_engines:Louder",
        "--set=stages.second.deterministic=true",
        f"--set=stages.second.options={json.dumps(options)}",
    ]
    once = '["idle",null,[["kill",["second"]],["settle"]]]'
    done = CliRunner().invoke(main, ["stress", "echo", *overrides, "--cluster", "agents", "--replay", once])
    assert done.exit_code == 1, done.output
    assert "violated: corrupted: " in done.stderr
    assert "--cluster=agents" in shlex.split(done.stderr.strip().splitlines()[-1])
