"""Formats the measurements as tables, targets and a plot.

Rates and CPU are medians over the repetitions that succeeded; latencies are percentiles of the samples of all of them.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.ring.checks import RAW_SOCKET, RINGS, RINGS_AWAKE, Idle, Mark
from bench.ring.measure import Failure, Result

SIZES = (64, 1 << 10, 8 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)

Table = tuple[str, list[str], list[list[str]]]
"""Title, columns, rows."""


class Target(NamedTuple):
    what: str
    measured: float | None
    bound: str
    met: bool | None
    """None if it could not be measured."""


class Figures:
    """Results by transport and size, one per repetition."""

    def __init__(self) -> None:
        self._results: dict[tuple[str, int], list[Result | Failure]] = {}
        self.missing: dict[str, str] = {}
        self.round_trips_s: dict[str, list[float]] = {}
        self.idle: dict[str, Idle] = {}

    def add(self, name: str, size: int, result: Result | Failure) -> None:
        self._results.setdefault((name, size), []).append(result)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self._results))

    @property
    def sizes(self) -> list[int]:
        return sorted({size for _, size in self._results})

    def results(self, name: str, size: int) -> list[Result]:
        return [result for result in self._results.get((name, size), ()) if isinstance(result, Result)]

    def failures(self) -> list[tuple[str, int, str]]:
        return [
            (name, size, result.reason)
            for (name, size), results in self._results.items()
            for result in results
            if isinstance(result, Failure)
        ]

    def rate(self, name: str, size: int) -> float | None:
        """Median bytes per second, streamed."""
        return self._median(name, size, lambda result: result.bytes_per_s)

    def cpu(self, name: str, size: int) -> float | None:
        """Median CPU seconds per GB, of both processes."""
        return self._median(name, size, lambda result: result.cpu_s_per_gb)

    def latency(self, name: str, size: int, percent: int) -> float | None:
        """A percentile of the latency in seconds, over the samples of all repetitions."""
        samples = sorted(ns for result in self.results(name, size) for ns in result.latencies_ns)
        return samples[min(len(samples) - 1, len(samples) * percent // 100)] / 1e9 if samples else None

    def _median(self, name: str, size: int, of: Callable[[Result], float]) -> float | None:
        values = [of(result) for result in self.results(name, size)]
        return statistics.median(values) if values else None

    def as_json(self) -> dict[str, Any]:
        rows = [
            {
                "transport": name,
                "size": size,
                "bytes_per_s": [result.bytes_per_s for result in self.results(name, size)],
                "cpu_s_per_gb": [result.cpu_s_per_gb for result in self.results(name, size)],
                "latency_p50_s": self.latency(name, size, 50),
                "latency_p99_s": self.latency(name, size, 99),
                "latency_samples": sum(len(result.latencies_ns) for result in self.results(name, size)),
            }
            for name, size in self._results
        ]
        return {
            "transports": rows,
            "failures": self.failures(),
            "missing": self.missing,
            "round_trips_s": self.round_trips_s,
            "idle": {name: idle._asdict() for name, idle in self.idle.items()},
        }


def size_name(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _of(value: float | None, change: Callable[[float], float]) -> float | None:
    return None if value is None else change(value)


def tables(figures: Figures) -> list[Table]:
    def by_size(title: str, cell: Callable[[str, int], str]) -> Table:
        columns = ["", *(size_name(size) for size in figures.sizes)]
        return title, columns, [[name, *(cell(name, size) for size in figures.sizes)] for name in figures.names]

    def microseconds(name: str, size: int, percent: int) -> str:
        return _number(_of(figures.latency(name, size, percent), lambda s: s * 1e6))

    found = [
        by_size("Throughput, GB/s", lambda name, size: _number(_of(figures.rate(name, size), lambda r: r / 1e9))),
        by_size(
            "Streamed, µs a message", lambda n, size: _number(_of(figures.rate(n, size), lambda r: size / r * 1e6))
        ),
        by_size(
            "One-way latency, µs: p50 / p99",
            lambda n, size: f"{microseconds(n, size, 50)} / {microseconds(n, size, 99)}",
        ),
        by_size("CPU of both processes, seconds per GB", lambda name, size: _number(figures.cpu(name, size))),
    ]
    if figures.round_trips_s:
        rows = [[name, _number(statistics.median(s) * 1e6)] for name, s in figures.round_trips_s.items()]
        found.append(("Round trip of 64 B", ["", "µs"], rows))
    if figures.idle:
        rows = [
            [name, f"{idle.seconds:g} s", str(idle.wake_ups), f"{idle.cpu_ns / 1e6:g} ms"]
            for name, idle in figures.idle.items()
        ]
        found.append(("Idle", ["", "waited", "wake-ups", "CPU"], rows))
    if figures.missing:
        found.append(("Missing", ["", "why"], [list(row) for row in figures.missing.items()]))
    if failures := figures.failures():
        found.append(("Failed", ["", "size", "why"], [[name, size_name(size), why] for name, size, why in failures]))
    return found


OURS = ("ours: send", "ours: send, tuned", "ours: reserve in place, tuned", "ours: send, trio")
PEERS = (
    "multiprocessing.Queue",
    "multiprocessing.Pipe",
    "Unix socket",
    "pyzmq ipc + msgpack",
    "iceoryx2, spinning",
    "iceoryx2, events",
    "vllm-omni 0.30.0 connector",
    "Ray object store",
)
ICEORYX = {"ours: send": "iceoryx2, events", "ours: send, tuned": "iceoryx2, spinning"}
"""Pairs of a peer and our transport: both receivers sleep, or both spin."""
BIG = 1 << 20


def targets(figures: Figures) -> list[Target]:
    """Apply each bound to ``send`` with the defaults and to the tuned one."""
    found: list[Target] = []

    def ratio(name: str, others: Sequence[str], size: int, least: float) -> None:
        """The ratio to the fastest of these peers."""
        ours = figures.rate(name, size)
        rates = {other: rate for other in others if (rate := figures.rate(other, size)) is not None}
        if ours is None:
            if name in figures.names:
                found.append(Target(f"{size_name(size)}: {name}", None, "to work", False))
            return
        if not (rates or figures.missing.keys() & set(others)):
            return
        if rates:
            fastest = max(rates, key=lambda other: rates[other])
            what, value = f"{size_name(size)}: {name} / {fastest}", ours / rates[fastest]
            found.append(Target(what, value, f">= {least:g}", value >= least))
        else:
            found.append(Target(f"{size_name(size)}: {name} / {others[0]}", None, f">= {least:g}", None))

    for size in figures.sizes:
        for name in OURS[:2]:
            if size >= BIG:
                ratio(name, ("memcpy",), size, 0.9)
                ratio(name, ("memcpy, over two places",), size, 0.9)
                ratio(name, [peer for peer in PEERS if peer not in ICEORYX.values()], size, 1.0)
            ratio(name, (ICEORYX[name],), size, 1.0)
            ratio(name, ("vllm-omni 0.30.0 connector",), size, 10.0)
            ratio(name, ("multiprocessing.Queue",), size, 3.0)
        if size >= BIG:
            ratio(OURS[2], (OURS[1],), size, 1.0)
    if (rate := figures.rate("ours: send", 64)) is not None:
        found.append(Target("64 B: ours: send, µs a message", 64 / rate * 1e6, "<= 5", 64 / rate <= 5e-6))
    trips = {name: statistics.median(seconds) for name, seconds in figures.round_trips_s.items()}
    for name in (RINGS, RINGS_AWAKE):
        if name in trips and RAW_SOCKET in trips:
            value = trips[name] / trips[RAW_SOCKET]
            found.append(Target(f"round trip: {name} / {RAW_SOCKET}", value, "<= 1.2", value <= 1.2))
    found += [
        Target(f"idle: wake-ups, {name}", idle.wake_ups, "= 0", idle.wake_ups == 0)
        for name, idle in figures.idle.items()
    ]
    return found


def flat(marks: Sequence[Mark]) -> list[Target]:
    """Compare the first mark of a long run with the last, at both ends."""
    first, last = marks[0], marks[-1]
    grown = max(after - before for before, after in zip(first.rss, last.rss, strict=True)) / 1e6
    opened = max(after - before for before, after in zip(marks[1].fds, last.fds, strict=True))
    return [
        Target("long run: RSS grown, MB", grown, "<= 1", grown <= 1),
        Target("long run: descriptors more than half-way through", opened, "= 0", opened <= 0),
    ]


def target_table(found: Iterable[Target]) -> Table:
    words = {True: "met", False: "NOT MET", None: "missing"}
    rows = [
        [target.what, "–" if target.measured is None else f"{target.measured:.2f}", target.bound, words[target.met]]
        for target in found
    ]
    return "Targets", ["", "measured", "bound", ""], rows


def markdown(found: Iterable[Table]) -> str:
    parts: list[str] = []
    for title, columns, rows in found:
        lines = [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]
        parts.append(f"**{title}**\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def plot(figures: Figures, file: Path) -> None:
    """Plot throughput and median latency over size, with logarithmic axes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    colours = pyplot.get_cmap("tab20").colors
    drawing, (left, right) = pyplot.subplots(1, 2, figsize=(15, 6.5), layout="constrained")
    for name, colour in zip(figures.names, itertools.cycle(colours), strict=False):
        style: dict[str, Any] = {"marker": "o", "color": colour, "label": name}
        style["linewidth"] = 2.5 if name in OURS else 1.2
        style["linestyle"] = "-" if name in OURS else ":" if name.startswith("memcpy") else "--"
        rates = [(size, rate / 1e9) for size in figures.sizes if (rate := figures.rate(name, size)) is not None]
        delays = [(size, s * 1e6) for size in figures.sizes if (s := figures.latency(name, size, 50)) is not None]
        for axes, points in ((left, rates), (right, delays)):
            if points:
                axes.plot(*zip(*points, strict=True), **style)
    for axes, title in ((left, "Throughput, GB/s"), (right, "One-way latency, median, µs")):
        axes.set(xscale="log", yscale="log", title=title, xlabel="message")
        axes.set_xticks(figures.sizes, [size_name(size) for size in figures.sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.legend(fontsize="small")
    drawing.savefig(file, dpi=110)
