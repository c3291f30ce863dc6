"""One system at full load, with a fault every two seconds: does memory grow, and does throughput return?

Rules
1. The stage on most routes is spared, so that its worker lives as long as the system. The other stages are hit in turn
   by SIGKILL, a crash in a step (if the engine has hooks), a pause and SIGSTOP.
2. Resident memory is read once a second. The harness lives in the parent, so it keeps no outputs, and of a fault only
   its times. The slope is that of the least-squares line after the first fifth of the run, while caches fill. Its error
   is the standard error for as many independent samples as the residuals' autocorrelation leaves. The slope of the
   second half distinguishes steady growth from a heap that levels off.
3. Throughput is counted before the first fault, and later in the times from when every stage serves again to the
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
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import trio

from omni_actors.stress.driver import Driver
from omni_actors.stress.report import Tally, markdown_table
from omni_actors.stress.run import run_with_faults
from omni_actors.stress.schedule import Crash, Freeze, Kill, Operation, Pause
from omni_actors.stress.workload import Workload
from omni_actors.system import OmniSystem

EVERY_S = 2.0
"""The time between faults. It is longer if a stage recovers slowly, so that some time without a fault follows each."""
BETWEEN_FAULTS_S = 0.4
"""The shortest time of counting between two faults."""
WARM_UP_S, FAULT_FREE_S = 10.0, 60.0
"""Before the first fault: warm-up, and fault-free count. At most a twentieth and a tenth of the run."""
WARM_UP_SHARE = 0.2
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
class _Count:
    """Outputs that were read during a time."""

    outputs: int = 0
    seconds: float = 0.0

    @property
    def per_s(self) -> float:
        return self.outputs / self.seconds if self.seconds else 0.0


@dataclass
class Soak:
    """The results of a soak."""

    seconds: float
    spared: str
    sizes: dict[str, array[float]] = field(default_factory=dict)
    """Resident memory by process ("parent", and the workers of the spared stage). Seconds since the start and bytes
    alternate."""
    fault_free: _Count = field(default_factory=_Count)
    between_faults: _Count = field(default_factory=_Count)
    tally: Tally = field(init=False)

    @property
    def rss(self) -> dict[str, list[tuple[float, float]]]:
        """The memory of each process: (seconds since the start, bytes)."""
        return {name: list(zip(both[::2], both[1::2], strict=True)) for name, both in self.sizes.items()}

    def as_json(self) -> dict[str, Any]:
        return {
            **self.tally.as_json(),
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
                "fault_free_per_s": self.fault_free.per_s,
                "between_faults_per_s": self.between_faults.per_s,
                "between_faults_s": self.between_faults.seconds,
            },
        }

    def as_markdown(self) -> str:
        before, between = self.fault_free.per_s, self.between_faults.per_s
        throughput = ("", f"{before:.1f}", f"{between:.1f}", f"{between / before if before else 0.0:.2f}")
        memory = [
            (
                name,
                f"{samples[0][1] / 1e6:.1f} MB",
                f"{samples[-1][1] / 1e6:.1f} MB",
                str(slope(samples)),
                str(slope(samples, 0.5)),
            )
            for name, samples in self.rss.items()
        ]
        processes = ("process", "RSS at the beginning", "at the end", "slope, per minute", "in the second half")
        tables = (
            markdown_table(processes, memory),
            markdown_table(("outputs a second", "fault-free", "between faults", "ratio"), [throughput]),
            self.tally.as_markdown(),
        )
        return "\n\n".join(tables)


def soak(workload: Workload, seconds: float, mark: str, on_progress: Callable[[str], None]) -> Soak:
    """Run a soak of ``seconds``. mark: see ``run.run_with_faults``. on_progress: gets a summary at each fault."""
    soaked = Soak(seconds, spared_stage(workload))

    async def work(omni: OmniSystem, driver: Driver) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_sample, omni, soaked)
            await _inject_faults(driver, workload, soaked, on_progress)
            nursery.cancel_scope.cancel()

    soaked.tally = run_with_faults(workload, "full", None, mark, work)
    return soaked


def spared_stage(workload: Workload) -> str:
    """The stage on most routes; of several, the one furthest upstream."""
    most = Counter(stage for each in workload.templates.values() for stage in each.stages)
    return max(workload.stages, key=lambda stage: (most[stage], -workload.stages.index(stage)))


def faults(workload: Workload, spared: str) -> Iterator[Operation]:
    """Yield the faults of a soak, without an end: four kinds for each stage but the spared one, in turn."""
    for stage in itertools.cycle([each for each in workload.stages if each != spared] or [spared]):
        yield Kill((stage,))
        yield Crash(stage, "raise", "fail") if stage in workload.hooks else Kill((stage,))
        yield Pause(stage, 200)
        yield Freeze(stage)


async def _inject_faults(driver: Driver, workload: Workload, soaked: Soak, on_progress: Callable[[str], None]) -> None:
    """Count without faults, then inject faults and count between them, until the time is up."""
    until = time.monotonic() + soaked.seconds
    await trio.sleep(min(WARM_UP_S, soaked.seconds / 20))
    await _count(driver, soaked.fault_free, min(FAULT_FREE_S, soaked.seconds / 10))
    for fault in faults(workload, soaked.spared):
        if time.monotonic() > until:
            return
        injected_at = time.monotonic()
        await driver.do(fault)
        await trio.sleep(PAUSED_S)
        with trio.move_on_after(workload.patience_s):
            await driver.until_settled()
            driver.judge_ended()
        await _count(driver, soaked.between_faults, max(BETWEEN_FAULTS_S, injected_at + EVERY_S - time.monotonic()))
        on_progress(f"{driver.tally.faults} faults, {until - time.monotonic():.0f} s to go")


async def _count(driver: Driver, count: _Count, for_s: float) -> None:
    began, outputs = time.monotonic(), driver.client.outputs
    await trio.sleep(for_s)
    count.outputs += driver.client.outputs - outputs
    count.seconds += time.monotonic() - began


async def _sample(omni: OmniSystem, soaked: Soak) -> None:
    """Record the resident memory of this process and of the spared stage's workers once a second, until cancelled.

    Health may still name a worker that has ended. It is skipped: its process is gone, or a zombie, which has no memory.
    """
    began, spared = time.monotonic(), soaked.spared
    while True:
        workers = {f"{spared}.{each.replica}": each.pid for each in omni.health().stages[spared] if each.pid}
        for name, pid in {"parent": os.getpid(), **workers}.items():
            with suppress(OSError):
                if size := resident(pid):
                    soaked.sizes.setdefault(name, array("d")).extend((time.monotonic() - began, size))
        await trio.sleep(1)


def resident(pid: int) -> int:
    """Resident memory in bytes, shared memory included."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def slope(samples: Sequence[tuple[float, float]], after: float = WARM_UP_SHARE) -> Slope:
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
