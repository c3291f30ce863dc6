"""The counts that the orchestrator keeps equal a recount, in random schedules of requests and faults."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from omni_actors.errors import InvalidRequest
from omni_actors.orchestrator.orchestrator import Orchestrator
from omni_actors.orchestrator.unread import SMALL_BYTES
from omni_actors.protocol.messages import Address
from omni_actors.stress.simulation.simulation import Simulation, simulate
from tests.support.simulated_system import PIECES, numbers, open_simulated_system, read, until


def recount(orchestrator: Orchestrator) -> dict[str, object]:
    """Count loads, places and names from the requests themselves."""
    dispatcher, registered = orchestrator._dispatcher, orchestrator.readers._requests.values()
    running = dispatcher.running()
    ended = [request for request in registered if request.lifecycle.ended]
    return {
        "loads": {
            address: sum(request.replay_state.is_held_by(address) for request in dispatcher.dispatched.values())
            for address in dispatcher.placement.replicas
        },
        "in_flight": len(running) + sum(request.account.charged > SMALL_BYTES for request in ended),
        "names": {request.name: request for request in (*running, *ended)},
    }


def counts(orchestrator: Orchestrator) -> dict[str, object]:
    replicas = orchestrator._dispatcher.placement.replicas
    return {
        "loads": {address: orchestrator.pools.loads[address] for address in replicas},
        "in_flight": orchestrator.in_flight,
        "names": orchestrator.open_requests,
    }


@pytest.mark.parametrize("schedules", [10, pytest.param(40, marks=pytest.mark.slow)])
def test_after_every_step_of_any_task_the_counts_equal_a_recount(
    monkeypatch: pytest.MonkeyPatch, schedules: int
) -> None:
    inject = Simulation.before_task_step
    wrong: list[tuple[object, object]] = []
    most_loaded = most_in_flight = steps = 0

    def checked(simulation: Simulation, task: trio.lowlevel.Task) -> None:
        nonlocal most_loaded, most_in_flight, steps
        inject(simulation, task)
        if (omni := getattr(simulation, "_omni", None)) is None:
            return
        kept, right = counts(omni._orchestrator), recount(omni._orchestrator)
        if kept != right and not wrong:  # an instrument of trio must not raise
            wrong.append((kept, right))
        steps += 1
        most_in_flight = max(most_in_flight, omni.in_flight)
        most_loaded = max(most_loaded, *omni._orchestrator.pools.loads.values(), 0)

    monkeypatch.setattr(Simulation, "before_task_step", checked)
    deaths = 0
    for seed in range(schedules):
        result = simulate(seed)
        assert result.tally.found == [], seed
        assert not wrong, (seed, wrong)
        deaths += sum(fault.startswith("killed") for fault, _ in result.tally.rows)
    assert min(most_loaded, most_in_flight, deaths) > 1
    assert steps > 250 * schedules


async def test_a_name_that_the_system_makes_is_not_one_in_use(autojump_clock: trio.testing.MockClock) -> None:
    async with open_simulated_system() as system:
        given = system.ask(pieces=1, request_id="req-1")
        made = system.ask(pieces=1)
        assert (given.request_id, made.request_id) == ("req-1", "req-2")
        with pytest.raises(InvalidRequest, match="in flight"):
            system.ask(request_id=made.request_id)
        assert len(await read(given)) == len(await read(made)) == 1
        assert len(await read(system.ask(pieces=1, request_id="req-2"))) == 1


async def test_a_request_that_waits_to_be_replayed_is_counted_as_queued(autojump_clock: trio.testing.MockClock) -> None:
    async with open_simulated_system() as system:
        generation = system.ask()
        await until(lambda: system.unread > 0)
        assert system.gauge("requests_queued") == 0
        system.spawner.living[Address("second", 0)].kill()
        await trio.testing.wait_all_tasks_blocked()
        assert system.gauge("requests_queued") == 1
        assert numbers(await read(generation)) == list(range(PIECES))
        assert system.gauge("requests_queued") == 0
