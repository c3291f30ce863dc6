"""The harness finds what it is there to find. Bugs are planted in engines and doubles, never by a switch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from omni_actors.messages import Address
from omni_actors.stress import leaks
from omni_actors.stress.faults import ShortSpawner
from omni_actors.stress.run import run_schedule
from omni_actors.stress.schedule import Crash, Full, Kill, Pause, Schedule, Settle, Starve, Submit, Wait
from omni_actors.stress.workload import Workload
from ringbuf import Ring

HIT_IN_THE_MIDDLE = Schedule("idle", None, (Submit("audio, long"), Wait(30), Kill(("second",)), Settle()))
HIT_BY_NOBODY = Schedule("idle", None, (Submit("audio, short"), Settle()))


def test_a_sound_system_passes_and_each_fault_is_counted_and_timed(quiet_day: Workload, mark: str) -> None:
    operations = (
        *(Submit("text and audio, long", "fail"), Wait(10), Kill(("first", "second")), Settle()),
        *(Submit("audio, long"), Crash("second", "raise"), Settle()),
        *(Full("second", 1), Settle(), Pause("first", 20), Starve("second"), Settle()),
    )
    result = run_schedule(quiet_day, Schedule("one", None, operations), mark)
    assert result.violations == []
    rows = result.tally.rows
    assert {fault: row.faults for (fault, _), row in rows.items()} == {
        "SIGKILL, several at once": 2,
        "exception in step": 1,
        "no memory for rings": 1,
        "SIGSTOP, then SIGCONT": 1,
        "out of memory": 1,
    }
    for fault in ("SIGKILL, several at once", "exception in step", "no memory for rings"):
        for timing in rows[fault, "one"].timings:
            assert timing.detected_s is not None
            assert timing.ready_s is not None
            assert timing.recovered_s is not None
            assert 0 < timing.detected_s < timing.ready_s
            assert timing.detected_s < timing.recovered_s


@pytest.mark.parametrize(
    ("engine", "schedule", "kinds", "words"),
    [
        ("Stutters", HIT_IN_THE_MIDDLE, {"lost", "duplicated"}, "3840 bytes, 2880 expected"),
        ("Mute", HIT_IN_THE_MIDDLE, {"hung"}, "has no outcome"),
        ("Faint", HIT_BY_NOBODY, {"disturbed"}, "nobody killed it"),
        ("Daemon", HIT_IN_THE_MIDDLE, {"leaked"}, "sleep 300"),
    ],
)
def test_a_planted_bug_is_found(
    engine: str, schedule: Schedule, kinds: set[str], words: str, planted: Callable[[str], Workload], mark: str
) -> None:
    """``lost`` where the system itself saw that the second run differs, and ended the request for it."""
    result = run_schedule(planted(engine), schedule, mark)
    for pid in leaks.marked_processes(mark):
        os.kill(pid, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(pid)])
    assert {violation.kind for violation in result.violations} >= kinds - {"lost"}
    assert {violation.kind for violation in result.violations} <= kinds
    assert any(words in violation.what for violation in result.violations), result.violations
    assert result.tally.violations == len(result.violations)


def test_a_descriptor_that_stays_open_here_is_found(
    quiet_day: Workload, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    connect = ShortSpawner.connect

    def leaking(self: ShortSpawner, producer: Address, consumer: Address, capacity: int, generation: int) -> Ring:
        ring = connect(self, producer, consumer, capacity, generation)
        kept.append(os.dup(ring.fds[0]))
        return ring

    monkeypatch.setattr(ShortSpawner, "connect", leaking)
    result = run_schedule(quiet_day, Schedule("idle", None, ()), mark)
    for fd in kept:
        os.close(fd)
    assert [violation.kind for violation in result.violations] == ["leaked"] * len(kept)
    assert all("memfd:ringbuf" in violation.what for violation in result.violations)
    assert result.tally.row("(none)", "idle").violations["leaked"] == len(kept)
