"""A summary as a Markdown table, which a terminal shows as well, and as a plot."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from omni_actors.cli.bench.generator import Load, Run
from omni_actors.cli.bench.summary import FIGURES, PERCENTILES, Summary


def markdown(summary: Summary) -> str:
    """Return the summary as Markdown: a table of the figures, and a list of what is not a distribution."""
    columns = ["n", "mean", *(f"p{p}" for p in PERCENTILES), "max"]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, found in summary.figures.items():
        kind = FIGURES[name]
        values = [found.mean, *found.percentiles.values(), found.maximum]
        cells = [str(found.count), *(_number(value, kind.unit) for value in values)]
        lines.append(f"| {kind.title} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {fact}" for fact in facts(summary))])


def facts(summary: Summary) -> list[str]:
    """Return what the summary says besides its distributions, one line each."""
    tokens = "" if summary.tokens_per_s is None else f", {summary.tokens_per_s:.1f} tokens/s"
    sound = f", {summary.sound_per_s:.2f} s of speech per second" if summary.sound_per_s else ""
    rates = f"{summary.requests_per_s:.2f} requests/s{tokens}{sound}"
    succeeded = f"{summary.succeeded} of {summary.measured} requests succeeded in {summary.elapsed_s:.1f} s"
    found = [f"{load_words(summary.load)}: {succeeded}: {rates}"]
    if summary.errors:
        found.append("errors: " + ", ".join(f"{count} × {kind}" for kind, count in summary.errors.items()))
    if summary.goodput is not None:
        bounds = ", ".join(f"{name} ≤ {bound:g}" for name, bound in summary.goodput.bounds.items())
        share = f"{summary.goodput.requests} of {summary.measured} requests ({summary.goodput.share:.1%})"
        found.append(f"goodput with {bounds}: {share}, {summary.goodput.per_s:.2f} requests/s")
    cpu = f"{summary.generator_cpu_s_per_request * 1000:.2f} ms of CPU time per request"
    found.append(f"the generator: {summary.generator_cpu:.0%} of a core, {cpu}")
    return found


def load_words(load: Load) -> str:
    """Return what was asked of the server, in words."""
    if load.rate is None:
        return f"{load.endpoint}, {load.concurrency} at a time"
    return f"{load.endpoint}, {load.rate:g} arrivals/s ({load.arrivals})"


def _number(value: float, unit: str) -> str:
    if unit != "s":
        return f"{value:.2f}"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def plot_formats() -> list[str]:
    """Return the suffixes of the files that ``plot`` writes. Raises ImportError: matplotlib is not installed."""
    from matplotlib.figure import Figure

    return sorted(Figure().canvas.get_supported_filetypes())


def plot(run: Run, summary: Summary, path: Path) -> None:
    """Draw the distribution of each time, and the requests over time. path: a file of one of ``plot_formats``.

    Raises ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    shares, timeline = figure.subplots(1, 2)
    good = [each for each in run.measurements if each.error is None]
    first = min((each.due for each in run.measurements), default=0.0)
    for name in ("ttft", "ttfa", "e2e"):
        found = [(each.due - first, values[name]) for each in good if name in (values := each.figures())]
        if found:
            ordered = np.sort([value for _, value in found])
            shares.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), label=FIGURES[name].title)
            timeline.plot(*zip(*found, strict=True), ".", label=FIGURES[name].title)
    for each in run.measurements:
        if each.error is not None:
            timeline.axvline(each.due - first, color="red", alpha=0.3)
    shares.set(xlabel="seconds", ylabel="share of requests", ylim=(0, 1))
    timeline.set(xlabel="seconds since the start", ylabel="seconds (a red line is an error)")
    shares.legend()
    figure.suptitle(load_words(summary.load))
    figure.savefig(path)
