"""How workers share the machine's cores: thread budgets, cores and yielding, on a simulated machine."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from omni_actors.platform import cpu_sharing as module
from omni_actors.platform.cpu_sharing import WORKERS, YIELD_MAX_S, YIELD_SHARE, CpuSharing, CpuSharingPage
from tests.support.open_descriptors import open_descriptors

FAR = 1000
"""The number of a core that does not fit a byte of the page."""


class Machine:
    """Workers of one spawner on a machine of four cores, without their processes."""

    def __init__(self) -> None:
        self.shared = CpuSharingPage()
        self.numbers: dict[CpuSharing, int] = {}
        self.core = FAR
        """The core on which the calling thread runs."""
        self.now = 0.0
        self.moves: list[set[int]] = []

    def move(self, pid: int, cores: set[int]) -> None:
        self.moves.append(cores)
        if self.core not in cores:
            self.core = min(cores)

    def worker(self, threads: int, nice: int = 0) -> CpuSharing:
        number = self.shared.join()
        worker = CpuSharing(os.dup(self.shared.fd), number)
        worker.threads, worker.nice, self.numbers[worker] = threads, nice, number
        return worker

    def leave(self, worker: CpuSharing) -> None:
        self.shared.leave(self.numbers.pop(worker))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", machine.move)
    monkeypatch.setattr(module, "_current_core", lambda: machine.core)
    monkeypatch.setattr(module.time, "monotonic", lambda: machine.now)
    yield machine
    for worker in list(machine.numbers):
        machine.leave(worker)


def test_a_thread_budget_is_what_the_others_leave_but_at_least_one(machine: Machine) -> None:
    model, voice, vocoder = machine.worker(4), machine.worker(1), machine.worker(3)
    with model:
        assert model.thread_budget() == 4
        with voice:
            assert model.thread_budget() == 3
            with vocoder:
                assert model.thread_budget() == 1
            assert model.thread_budget() == 3
        assert model.thread_budget() == 4


def test_the_parent_moves_off_the_cores_of_computing_engines(machine: Machine) -> None:
    machine.core = 1
    machine.shared.move_off_busy_core()
    assert not machine.moves, "there are no workers"
    one, other = machine.worker(1), machine.worker(1)
    machine.shared.move_off_busy_core()
    assert not machine.moves, "no engine computes"
    with one:
        machine.shared.move_off_busy_core()
        assert machine.moves == [{0, 2, 3}, {0, 1, 2, 3}]
        assert machine.core == 0
        machine.shared.move_off_busy_core()
        assert len(machine.moves) == 2, "its core is free"
        with other:
            machine.shared.move_off_busy_core()
            assert machine.core == 2
    machine.moves.clear()
    machine.shared.move_off_busy_core()
    assert not machine.moves


def test_two_workers_that_could_use_all_cores_share_them(machine: Machine) -> None:
    one, other = machine.worker(4), machine.worker(4)
    with one:
        assert one.thread_budget() == 4
        with other:
            assert other.thread_budget() == 1
            assert one.thread_budget() == 3
            assert other.thread_budget() == 1
        assert one.thread_budget() == 4


def test_a_dead_worker_no_longer_counts_and_its_row_is_used_again(machine: Machine) -> None:
    model, doomed = machine.worker(2), machine.worker(4)
    doomed.__enter__()
    assert model.thread_budget() == 1
    number = machine.numbers[doomed]
    machine.leave(doomed)
    assert model.thread_budget() == 2
    assert machine.numbers[machine.worker(1)] == number


def test_a_worker_that_begins_to_compute_moves_off_the_cores_of_the_others(machine: Machine) -> None:
    model, voice, vocoder = machine.worker(2), machine.worker(1), machine.worker(1)
    everywhere = {0, 1, 2, 3}
    machine.core = 1
    with model:
        with voice:
            assert machine.moves == [{0, 2, 3}, everywhere], "moved, and not pinned"
            with vocoder:
                assert machine.moves[2:] == [{2, 3}, everywhere]
        machine.moves.clear()
        with voice:
            assert machine.moves == [], "no engine runs on its core"
        machine.core = 3
        model.thread_budget()  # the kernel has moved it
        with voice:
            assert machine.moves == [{0, 1, 2}, everywhere]


def test_the_kernel_decides_while_engines_run_on_every_core(machine: Machine) -> None:
    others = [machine.worker(1) for _ in range(4)]
    for machine.core, other in enumerate(others):
        other.__enter__()
    with machine.worker(1):
        assert machine.moves == []
    machine.leave(others[2])
    with machine.worker(1):
        assert machine.moves == [{2}, {0, 1, 2, 3}]


def test_a_worker_yields_to_pending_first_outputs_of_workers_with_lower_nice(machine: Machine) -> None:
    thinker, talker, decoder = machine.worker(1), machine.worker(1, nice=10), machine.worker(1, nice=15)
    workers = [thinker, talker, decoder]
    assert [worker.should_yield() for worker in workers] == [False] * 3
    thinker.announce_first_output(pending=True)
    assert [worker.should_yield() for worker in workers] == [False, True, True]
    talker.announce_first_output(pending=True)
    thinker.announce_first_output(pending=False)
    assert [worker.should_yield() for worker in workers] == [False, False, True]
    machine.leave(talker)
    assert not decoder.should_yield(), "the worker that it yielded to is dead"


def test_a_worker_yields_for_a_bounded_time(machine: Machine) -> None:
    thinker, talker = machine.worker(1), machine.worker(1, nice=10)
    thinker.announce_first_output(pending=True)

    def yielded_s() -> float:
        began = machine.now
        while True:
            with talker:
                if not talker.should_yield():
                    return machine.now - began
            machine.now += YIELD_MAX_S / 64

    assert yielded_s() == YIELD_MAX_S
    assert yielded_s() == 0.0
    with talker:
        machine.now += 4 * YIELD_MAX_S
    assert yielded_s() == pytest.approx(YIELD_SHARE * 4 * YIELD_MAX_S, abs=YIELD_MAX_S / 64), (
        "a share of the time that it computed"
    )
    machine.now += YIELD_MAX_S / 2
    assert yielded_s() == pytest.approx(YIELD_MAX_S / 2, abs=YIELD_MAX_S / 64), "as long as it had nothing to do"
    machine.now += 100 * YIELD_MAX_S
    assert yielded_s() == YIELD_MAX_S, "no longer after a long rest"


def test_a_turn_without_a_step_counts_as_yielding_and_a_rest_after_it_does_not(machine: Machine) -> None:
    thinker, talker = machine.worker(1), machine.worker(1, nice=10)
    thinker.announce_first_output(pending=True)
    with talker:
        assert talker.should_yield()
        machine.now += YIELD_MAX_S / 2  # it receives chunks
    with talker:
        assert talker.should_yield()
    with talker:
        pass  # its request was aborted
    machine.now += 10 * YIELD_MAX_S
    with talker:
        assert talker.should_yield()
        machine.now += YIELD_MAX_S
    with talker:
        assert not talker.should_yield()


def test_a_page_that_cannot_be_mapped_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    before = len(open_descriptors())
    monkeypatch.setattr(module.mmap, "mmap", refuse)
    for _ in range(3):
        with pytest.raises(OSError, match="Too many"):
            CpuSharingPage().join()
    assert len(open_descriptors()) == before


def test_cores_that_were_taken_from_this_process_are_no_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, cores: set[int]) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    machine.core = 1
    with machine.worker(1), machine.worker(1):
        pass


def test_the_page_exists_as_long_as_there_are_workers(machine: Machine) -> None:
    before = len(open_descriptors())
    workers = [machine.worker(1) for _ in range(WORKERS + 2)]
    assert sorted(machine.numbers.values()) == [*range(WORKERS), WORKERS - 1, WORKERS - 1]
    assert len(open_descriptors()) > before
    while workers:
        machine.leave(workers.pop())
    assert machine.shared.fd == -1
    assert len(open_descriptors()) == before
