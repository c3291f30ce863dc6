"""The simulation of 100 nodes: the system passes, a seed determines a run, and planted bugs are found.

The rules are those of ``test_simulation``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from omni_actors.cli import main
from omni_actors.cluster import lease, placements
from omni_actors.cluster.placement import Node
from omni_actors.cluster.placements import Placements
from omni_actors.errors import NoPlace
from omni_actors.stress.simulation.agent import SimulatedAgent
from omni_actors.stress.simulation.cluster import SimulatedCluster
from omni_actors.stress.simulation.journal import Journal
from omni_actors.stress.simulation.simulation import simulate

NODES = 100
SEEDS = 400
"""Schedules that a planted bug is looked for in, at the most."""
NODE_FAULTS = {
    *("agent killed", "node lost", "node lost, silently", "partition of two nodes"),
    *("partition, both ways", "partition, into", "partition, out of"),
}


def first_violated(since: int = 0) -> Journal:
    """The first schedule in which something was violated."""
    for seed in range(since, since + SEEDS):
        result = simulate(seed, NODES)
        if result.tally.found:
            return result
    pytest.fail(f"nothing was violated in {SEEDS} schedules")


def facts(result: Journal) -> str:
    return "\n".join(map(str, result.tally.found))


def test_the_system_passes() -> None:
    for seed in range(6):
        result = simulate(seed, NODES)
        assert result.tally.found == [], (seed, result.tally.found, *result.log)


def test_a_worker_that_is_cut_off_may_keep_requests_that_have_ended() -> None:
    """A false alarm once: the message that ends them was still held back when the schedule was over."""
    assert simulate(75_108_418, NODES).tally.found == []


def test_a_pause_under_way_has_its_replies_when_the_system_closes() -> None:
    """It raised SystemClosed once."""
    assert simulate(82_000_125, NODES).tally.found == []


def test_a_request_that_ends_during_a_trial_does_not_start_again() -> None:
    assert simulate(77_103_572, NODES).tally.found == []


@pytest.mark.slow
def test_the_system_passes_and_every_fault_was_injected() -> None:
    faults, log = set[str](), ""
    for seed in range(200):
        result = simulate(seed, NODES)
        assert result.tally.found == [], (seed, result.tally.found, *result.log)
        faults |= {fault for fault, _ in result.tally.rows}
        log += "\n".join(result.log)
    assert faults >= NODE_FAULTS | {"killed", "stopped for good", "scale up", "sleep", "abort"}
    for happened in ("its lease ended", "no renewal of its lease", "LinkLost", "no node can run", " joins"):
        assert happened in log, happened


def test_the_same_seed_gives_the_same_log_in_another_process() -> None:
    """A run in another process, where sets of strings have another order."""
    program = "from omni_actors.stress.simulation.simulation import simulate; print(*simulate(7, 100).log, sep=chr(10))"
    there = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "1234"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.splitlines() == "\n".join(simulate(7, NODES).log).splitlines()


def test_the_command_prints_how_to_repeat_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease.GrantedLease, "safe_at", property(lambda self: 0.0))
    seed = first_violated().seed
    file = tmp_path / "figures.json"
    arguments = ["stress", "--simulate", "1", "--seed", str(seed), "--nodes", str(NODES)]
    done = CliRunner().invoke(main, [*arguments, "--json", str(file)])
    assert done.exit_code == 1
    assert done.stderr.endswith(f"python -m omni_actors.{' '.join(arguments)}\n")
    assert json.loads(file.read_bytes())["nodes"] == NODES


def test_nodes_need_a_simulation() -> None:
    assert "--nodes needs --simulate" in CliRunner().invoke(main, ["stress", "--nodes", str(NODES)]).stderr


# planted bugs


def test_a_parent_that_does_not_wait_for_the_end_of_the_lease_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease.GrantedLease, "safe_at", property(lambda self: 0.0))
    assert "starts on n" in facts(first_violated()), "two generations of an address run at once"


def test_an_agent_whose_lease_never_ends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedAgent, "_check_lease", lambda self: None)
    assert "starts on n" in facts(first_violated())


@pytest.mark.slow
def test_a_parent_that_grants_to_a_node_that_it_has_given_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def to_parent(self: SimulatedAgent, act: Callable[[], None]) -> None:
        self._network.send(self.node, self._parent, act)

    def renew(self: SimulatedAgent, asked_at: float) -> None:
        self.to_agent(partial(self._take_grant, asked_at))

    monkeypatch.setattr(SimulatedAgent, "to_parent", to_parent)
    monkeypatch.setattr(SimulatedAgent, "_renew", renew)
    first_violated()


def test_a_parent_that_does_not_notice_silence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease.GrantedLease, "is_silent", lambda self, now: False)
    monkeypatch.setattr(lease.GrantedLease, "silent_at", property(lambda self: 1e9))
    assert "hung" in facts(first_violated())


@pytest.mark.slow
def test_a_worker_that_is_placed_on_a_lost_node_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Placements, "lose", lambda self, name: None)
    first_violated()


@pytest.mark.slow
def test_a_worker_that_waits_for_ever_for_a_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def join(self: Placements, node: Node) -> None:
        self._nodes[node.name] = node

    monkeypatch.setattr(Placements, "join", join)
    assert "no node can run" in facts(first_violated())


@pytest.mark.slow
def test_colocated_workers_that_are_placed_one_by_one_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    place, place_each = placements.place, placements.place_each

    def hasty(pipeline, wanted, nodes, held):  # type: ignore[no-untyped-def]
        used = {at.node for at in held.values()}
        alone = [*wanted][:1]
        try:
            return place(pipeline, alone, [node for node in nodes if node.name not in used], {})
        except NoPlace:
            return place_each(pipeline, alone, nodes, held)

    monkeypatch.setattr(placements, "place_each", hasty)
    assert "its colocated worker" in facts(first_violated())


@pytest.mark.slow
def test_a_broken_link_that_nobody_reports_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedCluster, "_on_broken", lambda self, edge: None)
    assert "hung" in facts(first_violated())
