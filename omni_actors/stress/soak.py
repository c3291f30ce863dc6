"""One system at full load, with a fault every two seconds: does memory grow, and does throughput return?

Rules
1. The stage on most routes is spared, so that its worker lives as long as the system. The other stages are hit in turn
   by SIGKILL, a crash in a step (if the engine has hooks), a pause and SIGSTOP.
2. Resident memory is read once a second. The harness lives in the parent, so it keeps no outputs, and of a fault only
   its times. The slope is that of the least-squares line after the first fifth of the run, while caches fill. Its error
   is the standard error for as many independent samples as the residuals' autocorrelation leaves. The slope of the
   second half distinguishes steady growth from a heap that levels off.
3. Throughput is counted before the first fault, and later in the quiet times: from when every stage serves again to the
   next fault. The ratio must be near one.
"""

from __future__ import annotations

import itertools
import math
import os
import resource
import statistics
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import trio

from omni_actors.stress.driver import Driver
from omni_actors.stress.run import Result, run_with_faults
from omni_actors.stress.schedule import Crash, Freeze, Kill, Operation, Pause
from omni_actors.stress.workload import Workload
from omni_actors.system import OmniSystem

EVERY_S = 2.0
"""The time between faults. It is longer if a stage recovers slowly, so that a quiet time follows each fault."""
QUIET_S = 0.4
WARM_S, CALM_S = 10.0, 60.0
"""Before the first fault: warm-up, and fault-free count. At most a twentieth and a tenth of the run."""
WARMING = 0.2
PAUSED_S = 0.25
"""Longer than a pause, whose end no event reports."""


@dataclass(frozen=True)
class Slope:
    """Bytes per minute, with the standard error."""

    per_minute: float
    error: float

    def __str__(self) -> str:
        return f"{self.per_minute / 1e3:+.1f} ± {self.error / 1e3:.1f} kB"


@dataclass
class Soak:
    """The results of a soak. Throughputs are outputs per second."""

    seconds: float
    spared: str
    result: Result
    rss: dict[str, list[tuple[float, float]]]
    """By process ("parent", and the workers of the spared stage): (seconds since the start, bytes)."""
    calm_per_s: float
    quiet_per_s: float
    quiet_s: float

    def as_json(self) -> dict[str, Any]:
        return {
            **self.result.tally.as_json(),
            "seconds": self.seconds,
            "spared": self.spared,
            "rss": {
                name: {
                    "slope_per_minute": slope(samples).per_minute,
                    "error": slope(samples).error,
                    "second_half": asdict(slope(samples, 0.5)),
                    "samples": samples,
                }
                for name, samples in self.rss.items()
            },
            "throughput": {
                "fault_free_per_s": self.calm_per_s,
                "between_faults_per_s": self.quiet_per_s,
                "between_faults_s": self.quiet_s,
            },
        }

    def as_markdown(self) -> str:
        lines = [
            "| process | RSS at the beginning | at the end | slope, per minute | in the second half |",
            "|---|---:|---:|---:|---:|",
        ]
        for name, samples in self.rss.items():
            sizes = [_megabytes(size) for _, size in (samples[0], samples[-1])]
            lines.append("| " + " | ".join([name, *sizes, str(slope(samples)), str(slope(samples, 0.5))]) + " |")
        ratio = self.quiet_per_s / self.calm_per_s if self.calm_per_s else 0.0
        lines += [
            "",
            "| outputs a second | fault-free | between faults | ratio |",
            "|---|---:|---:|---:|",
            f"| | {self.calm_per_s:.1f} | {self.quiet_per_s:.1f} | {ratio:.2f} |",
            "",
            self.result.tally.as_markdown(),
        ]
        return "\n".join(lines)


@dataclass
class _Count:
    """Outputs that were read during a time."""

    outputs: int = 0
    seconds: float = 0.0

    @property
    def per_s(self) -> float:
        return self.outputs / self.seconds if self.seconds else 0.0


@dataclass
class _Record:
    rss: dict[str, array[float]] = field(default_factory=dict)
    """As in ``Soak``; seconds and bytes alternate."""
    calm: _Count = field(default_factory=_Count)
    quiet: _Count = field(default_factory=_Count)


def soak(workload: Workload, seconds: float, mark: str, on_progress: Callable[[str], None]) -> Soak:
    """Run a soak of ``seconds``. mark: see ``run.run_with_faults``. on_progress: gets a summary at each fault."""
    spared = spared_stage(workload)
    record = _Record()

    async def work(omni: OmniSystem, driver: Driver) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_sample, omni, spared, record)
            await _inject_faults(driver, workload, spared, seconds, record, on_progress)
            nursery.cancel_scope.cancel()

    result = run_with_faults(workload, "full", None, mark, work)
    rss = {name: list(zip(both[::2], both[1::2], strict=True)) for name, both in record.rss.items()}
    return Soak(
        seconds=seconds,
        spared=spared,
        result=result,
        rss=rss,
        calm_per_s=record.calm.per_s,
        quiet_per_s=record.quiet.per_s,
        quiet_s=record.quiet.seconds,
    )


def spared_stage(workload: Workload) -> str:
    """The stage on most routes; of several, the one furthest upstream."""
    most = Counter(stage for each in workload.templates.values() for stage in each.stages)
    return max(workload.stages, key=lambda stage: (most[stage], -workload.stages.index(stage)))


def _faults(workload: Workload, spared: str) -> Iterator[Operation]:
    for stage in itertools.cycle([each for each in workload.stages if each != spared] or [spared]):
        yield Kill((stage,))
        yield Crash(stage, "raise", "fail") if stage in workload.hooks else Kill((stage,))
        yield Pause(stage, 200)
        yield Freeze(stage)


async def _inject_faults(
    driver: Driver, workload: Workload, spared: str, seconds: float, record: _Record, on_progress: Callable[[str], None]
) -> None:
    """Count without faults, then inject faults and count between them, until the time is up."""
    until = time.monotonic() + seconds
    await trio.sleep(min(WARM_S, seconds / 20))
    await _count(driver, record.calm, min(CALM_S, seconds / 10))
    for fault in _faults(workload, spared):
        if time.monotonic() > until:
            return
        injected_at = time.monotonic()
        await driver.do(fault)
        await trio.sleep(PAUSED_S)
        with trio.move_on_after(workload.patience_s):
            await driver.until_quiet()
            driver.judge_ended()
        await _count(driver, record.quiet, max(QUIET_S, injected_at + EVERY_S - time.monotonic()))
        on_progress(f"{driver.tally.faults} faults, {until - time.monotonic():.0f} s to go")


async def _count(driver: Driver, count: _Count, for_s: float) -> None:
    began, outputs = time.monotonic(), driver.client.outputs
    await trio.sleep(for_s)
    count.outputs += driver.client.outputs - outputs
    count.seconds += time.monotonic() - began


async def _sample(omni: OmniSystem, spared: str, record: _Record) -> None:
    """Record the resident memory of this process and of the spared stage's workers once a second, until cancelled."""
    began = time.monotonic()
    while True:
        workers = {f"{spared}.{each.replica}": each.pid for each in omni.health().stages[spared] if each.pid}
        for name, pid in {"parent": os.getpid(), **workers}.items():
            record.rss.setdefault(name, array("d")).extend((time.monotonic() - began, resident(pid)))
        await trio.sleep(1)


def resident(pid: int) -> int:
    """Resident memory in bytes, shared memory included."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def slope(samples: Sequence[tuple[float, float]], after: float = WARMING) -> Slope:
    """Return the slope of rule 2. samples: (seconds, bytes), evenly spaced. after: the part of the time to skip.

    With fewer than three samples, the slope and its error are NaN.
    """
    kept = [sample for sample in samples if sample[0] >= samples[-1][0] * after] if samples else []
    if len(kept) < 3:
        return Slope(math.nan, math.nan)
    minutes, sizes = [at / 60 for at, _ in kept], [float(size) for _, size in kept]
    line = statistics.linear_regression(minutes, sizes)
    rest = [size - line.slope * at - line.intercept for at, size in zip(minutes, sizes, strict=True)]
    squares = math.fsum(each * each for each in rest)
    lagged = math.fsum(a * b for a, b in itertools.pairwise(rest))
    correlation = min(max(0.0, lagged / squares), 0.999) if squares else 0.0
    independent = max(3.0, len(kept) * (1 - correlation) / (1 + correlation))
    spread = math.fsum((at - statistics.fmean(minutes)) ** 2 for at in minutes)
    variance = squares / len(kept) * independent / (independent - 2)
    return Slope(line.slope, math.sqrt(variance / spread * len(kept) / independent))


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB"
