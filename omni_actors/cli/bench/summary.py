"""The figures of a run: percentiles, goodput, errors by kind, and what the generator itself cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from omni_actors.cli.bench.generator import Load, Run

PERCENTILES = (50, 90, 95, 99)


class FigureKind(msgspec.Struct, frozen=True):
    """title: what the figure is. unit: "s" or ""."""

    title: str
    unit: str = "s"


FIGURES: dict[str, FigureKind] = {
    "ttft": FigureKind("TTFT: to the first text"),
    "ttfa": FigureKind("TTFA: to the first sound"),
    "itl": FigureKind("between two events with text"),
    "tpot": FigureKind("for each token after the first"),
    "e2e": FigureKind("whole request"),
    "rtf": FigureKind("RTF: whole request / sound", ""),
    "underruns": FigureKind("underruns of the player", ""),
    "gap": FigureKind("silence in these underruns"),
    "late": FigureKind("sent late by the generator"),
    "delay": FigureKind("from the server's send to the generator's read"),
}
"""The figures by name. Those of a request count from the time at which it was due."""
BOUNDED = ("ttft", "ttfa", "tpot", "e2e", "rtf", "underruns", "gap")
"""The figures that goodput may bound: those of one request."""


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """A figure over all requests that have it. percentiles: by "p50", "p90", …."""

    count: int
    mean: float
    minimum: float
    maximum: float
    percentiles: dict[str, float]


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """bounds: the figures' bounds. requests: how many met all. share: of all measured. per_s: in each second."""

    bounds: dict[str, float]
    requests: int
    share: float
    per_s: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run.

    Attributes:
        load: What was asked of the server.
        measured, succeeded: Requests.
        errors: How many requests failed, by kind.
        elapsed_s: From the first request to the end of the last one.
        requests_per_s, tokens_per_s: Of those that succeeded. Without counts of tokens: None.
        sound_per_s: Seconds of speech in each second.
        figures: By name, see ``FIGURES``.
        goodput: None, if no bound was given.
        generator_cpu: The share of one core that the generator used.
        generator_cpu_s_per_request: Its CPU time for each request, in seconds.
    """

    load: Load
    measured: int
    succeeded: int
    errors: dict[str, int]
    elapsed_s: float
    requests_per_s: float
    tokens_per_s: float | None
    sound_per_s: float
    figures: dict[str, Distribution]
    goodput: Goodput | None
    generator_cpu: float
    generator_cpu_s_per_request: float


def summarize(run: Run, load: Load, bounds: Mapping[str, float]) -> Summary:
    """Return the figures of a run. bounds: the most that a figure of a good request may be, by ``BOUNDED``."""
    good = [each for each in run.measurements if each.error is None]
    figures = [each.figures() for each in good]
    samples = {name: [each[name] for each in figures if name in each] for name in FIGURES}
    samples["itl"] = [interval for each in good for interval in each.intervals]
    samples["delay"] = [delay for each in good for delay in each.delays]
    counts = [each.tokens for each in good if each.tokens is not None]
    measured = max(1, len(run.measurements))
    return Summary(
        load=load,
        measured=len(run.measurements),
        succeeded=len(good),
        errors=dict(Counter(each.error for each in run.measurements if each.error is not None).most_common()),
        elapsed_s=run.elapsed_s,
        requests_per_s=len(good) / run.elapsed_s,
        tokens_per_s=sum(counts) / run.elapsed_s if counts else None,
        sound_per_s=sum(each.sound_s for each in good) / run.elapsed_s,
        figures={name: distribution(values) for name, values in samples.items() if values},
        goodput=_goodput(figures, bounds, measured, run.elapsed_s) if bounds else None,
        generator_cpu=run.cpu_s / run.elapsed_s,
        generator_cpu_s_per_request=run.cpu_s / measured,
    )


def distribution(values: Sequence[float]) -> Distribution:
    """Return the distribution of at least one value."""
    found = np.asarray(values, np.float64)
    return Distribution(
        count=len(values),
        mean=float(found.mean()),
        minimum=float(found.min()),
        maximum=float(found.max()),
        percentiles={f"p{p}": float(np.percentile(found, p)) for p in PERCENTILES},
    )


def _goodput(
    figures: Sequence[Mapping[str, float]], bounds: Mapping[str, float], measured: int, elapsed_s: float
) -> Goodput:
    """Count the requests that meet all bounds. A request without a bounded figure does not meet it."""
    met = sum(all(each.get(name, np.inf) <= bound for name, bound in bounds.items()) for each in figures)
    return Goodput(bounds=dict(bounds), requests=met, share=met / measured, per_s=met / elapsed_s)
