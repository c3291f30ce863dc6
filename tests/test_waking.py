"""Waking stages, and scaling beside it, when calls are cancelled and timers fire in between, in virtual time."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from omni_actors.config import Restart
from omni_actors.errors import Aborted, DeadlineExceeded, Quarantined
from omni_actors.generation import Generation
from omni_actors.orchestrator.pieces import Input
from omni_actors.protocol.messages import Address
from tests.support.scaled_system import LOAD_S, Scaling, numbers, opened


async def test_a_cancelled_wake_up_wakes_all_replicas(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(replicas=3) as scaling:
        async with trio.open_nursery() as nursery:
            await scaling.omni.sleep(2)
            nursery.start_soon(scaling.omni.wake_up)
            while await scaling.omni.is_sleeping():
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert await numbers(scaling.ask()) == [0, 1, 2]
        await trio.sleep(10)
        assert set(scaling.states.values()) == {"ready"}


@pytest.mark.parametrize("turns", range(8))
async def test_a_retry_while_a_stage_wakes_starts_no_second_worker(
    turns: int, mock_clock: trio.testing.MockClock
) -> None:
    """The timer of the last replica fires ``turns`` turns after the stage began to wake."""
    mock_clock.autojump_threshold = 0
    last = Address("second", 3)
    async with opened(replicas=4, restart=Restart(intensity=0, retry_s=50.0)) as scaling:
        scaling.spawner.living[last].kill()
        await trio.sleep(1)
        retry_at = scaling.omni._supervisor.replicas[last].retry_at
        assert retry_at is not None
        await scaling.omni.sleep(2, stages=["second"])
        await trio.sleep_until(retry_at - 0.001)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scaling.omni.wake_up)
            for _ in range(turns):
                await trio.lowlevel.checkpoint()
            mock_clock.jump(0.002)
            await trio.sleep(10)
        living = [each for each in scaling.spawner.workers if each.address == last and each.alive]
        assert len(living) == 1


async def test_a_replica_that_was_given_up_is_not_announced_to_be_tried_again_once_it_sleeps(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with opened(restart=Restart(intensity=0, retry_s=50.0)) as scaling:

        def retry_in_s() -> list[float | None]:
            return [each.retry_in_s for each in scaling.omni.health().stages["second"]]

        scaling.spawner.living[Address("second", 0)].kill()
        await trio.sleep(1)
        assert retry_in_s() == [pytest.approx(49.0, abs=1.0)]
        await scaling.omni.sleep(2, stages=["second"])
        assert (scaling.states, retry_in_s()) == ({0: "asleep"}, [None])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scaling.omni.wake_up)
            await trio.sleep(LOAD_S / 2)
            assert (scaling.states, retry_in_s()) == ({0: "restarting"}, [None])


@pytest.mark.parametrize("replicas", [0, 1])
async def test_a_sleep_waits_for_a_request_that_starts_a_stage_from_zero(
    replicas: int, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(replicas=replicas, scale_from_zero=True) as scaling, trio.open_nursery() as nursery:
        if replicas:  # the request loses its replica
            request = scaling.ask(30)
            await trio.sleep(1)
            nursery.start_soon(lambda: scaling.omni.scale("second", 0, drain_s=1.0))
            await trio.sleep(0.1)
        else:
            request = scaling.ask(30)
        began = trio.current_time()
        await scaling.omni.sleep(2, stages=["second"], mode="wait")
        assert trio.current_time() - began < 60
        assert scaling.states == {0: "asleep"}
        assert await numbers(request) == list(range(30))


def replica_of(generation: Generation) -> Address:
    return generation.stream.request.replay_state.placement["second"]


async def test_suspects_are_tried_on_a_replica_that_is_taken_back(autojump_clock: trio.testing.MockClock) -> None:
    def ask(scaling: Scaling, tag: str, pieces: int) -> Generation:
        inputs = [Input({"n": number, "tag": tag}) for number in range(pieces)]
        return scaling.omni.submit({"script": inputs}, ["audio"], deadline_s=900.0)

    async with opened(replicas=2, routing="round_robin") as scaling, trio.open_nursery() as nursery:
        omni = scaling.omni
        long, suspect = ask(scaling, "long", 3000), ask(scaling, "a", 30)
        await numbers(scaling.ask(1))
        other = ask(scaling, "b", 30)
        await trio.sleep(0.5)
        address = replica_of(suspect)
        assert address == replica_of(other) != replica_of(long)
        scaling.spawner.living[address].die(signal="SIGSEGV")
        await trio.sleep(0.001)
        nursery.start_soon(lambda: omni.scale("second", 0, drain_s=900.0))
        await trio.sleep(60)
        assert list(scaling.states.values()) == ["draining"]
        await omni.scale("second", 1)
        began = trio.current_time()
        assert len(await numbers(suspect)) == 30
        assert trio.current_time() - began < 60, "the long request lasts for 300 s"
        omni.abort_all("the test is over")


@pytest.mark.parametrize("end", ["abort", "deadline", "conviction"])
async def test_many_suspects_that_end_together_are_looked_at_once(
    end: str, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests are equal, so they are one unit: of those that are convicted, one is tried."""
    count, worker = 50, Address("second", 0)
    async with opened(replicas=1) as scaling:
        inputs = [[Input({"n": number}) for number in range(50)] for _ in range(count)]
        deadline_s = 2.0 if end == "deadline" else 60.0
        requests = [scaling.omni.submit({"script": each}, ["audio"], deadline_s=deadline_s) for each in inputs]
        await trio.sleep(0.5)
        scaling.spawner.living[worker].die(signal="SIGSEGV")
        await trio.sleep(0.001)
        dispatcher, looks = scaling.omni._orchestrator._dispatcher, list[float]()
        look = dispatcher.dispatch_waiting

        def counted() -> None:
            looks.append(trio.current_time())
            look()

        monkeypatch.setattr(dispatcher, "dispatch_waiting", counted)
        if end == "abort":
            scaling.omni.abort_all("the test is over")
        elif end == "deadline":
            await trio.sleep(deadline_s)
        else:
            for _ in range(scaling.omni.pipeline.limits.replays):
                await trio.sleep(LOAD_S + 0.5)
                scaling.spawner.living[worker].die(signal="SIGSEGV")
        await trio.sleep(1)
        assert len(looks) < count / 5
        expected = {"abort": Aborted, "deadline": DeadlineExceeded, "conviction": Quarantined}[end]
        errors = [type(each.stream.request.error) for each in requests]
        assert errors.count(expected) >= count - 1, errors
