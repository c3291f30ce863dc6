"""`python -m bench.cluster`: what nodes and the lines between them cost, in time to first sound and in throughput.

The nodes are network namespaces of this machine, so all layouts of a pipeline have the same cores: what differs is the
way between the stages. Systems on one machine, two nodes and three nodes are open at the same time, and answer in turn,
one at a time, on each kind of line; a ratio compares them within a round.

Linux gives each session an equal share of the CPUs (autogroup), and agents have sessions of their own. So a layout with
more agents would get more of a busy machine. All processes run in one control group, where there are no such shares.

Delay is that of one way, which a forwarder adds to every packet (``tests.support.slow_lines``); the kernel's `tbf`
limits the bandwidth of each node. Each namespace runs a Ray node of its own, which starts the agent there.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
import trio

from bench.recovery import Subject, subject
from omni_actors import AudioChunk, OmniSystem
from omni_actors.cluster.placement import PARENT
from omni_actors.config import Cluster
from tests.cluster.ray_namespaces import RayNodes, ray_on
from tests.support.network import namespaces
from tests.support.slow_lines import slow_lines, why_no_slow_lines

ONE = "one machine"
LAYOUTS: dict[str, dict[str, dict[str, str]]] = {
    "omni": {
        ONE: {},
        "two nodes": {"thinker": PARENT, "talker": "n1", "code2wav": "n1"},
        "three nodes": {"thinker": "n1", "talker": "n2", "code2wav": PARENT},
    },
    "voice": {
        ONE: {},
        "two nodes": {"whisper": PARENT, "llm": "n1", "acoustic": PARENT, "vocoder": PARENT},
        "three nodes": {"whisper": PARENT, "llm": "n1", "acoustic": "n2", "vocoder": PARENT},
    },
    "echo": {
        ONE: {},
        "two nodes": {"source": PARENT, "middle": "n1", "sink": PARENT},
        "three nodes": {"source": "n1", "middle": "n2", "sink": PARENT},
    },
}
"""By pipeline: the node of each stage."""
LENGTHS = {"omni": {"max_tokens": 24, "talker_max_tokens": 25}, "voice": {"max_tokens": 24}, "echo": {}}
TOGETHER = 4
"""How many requests are sent at once to measure throughput."""
RAY_CPUS = 4
"""CPUs that each Ray node claims to have: each system reserves one for each worker, and all are open at once."""
CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
"""Where version 1 of control groups has its CPU controller."""
SETTLE_S = 11.0
"""Linux's BBR takes a connection's shortest round trip of the last 10 s for that of the line."""


class Line(NamedTuple):
    """How nodes are joined. bits_per_s: of each node; None: as fast as it goes."""

    name: str
    delay_s: float
    bits_per_s: int | None

    @property
    def is_slow(self) -> bool:
        return self.delay_s > 0 or self.bits_per_s is not None


LINES = (
    Line("no delay", 0.0, None),
    Line("1 ms", 0.001, None),
    Line("10 ms", 0.01, None),
    Line("100 Mbit/s", 0.0, 100_000_000),
    Line("10 ms, 100 Mbit/s", 0.01, 100_000_000),
)


class Figures(msgspec.Struct, frozen=True):
    """ttfa_s: of one request alone. rate: seconds of sound for each second, while some are answered together."""

    ttfa_s: float
    rate: float


class Round(msgspec.Struct, frozen=True):
    """One measurement of all layouts. load: the machine's load average at its end."""

    pipeline: str
    line: str
    load: float
    figures: dict[str, Figures]

    def ratio(self, layout: str, field: str) -> float:
        found: float = getattr(self.figures[layout], field) / getattr(self.figures[ONE], field)
        return found


@contextmanager
def one_control_group() -> Iterator[None]:
    """Schedule this process, and all that it starts within the block, without regard to sessions. Raises OSError."""
    group = CPU_GROUPS / f"omni-bench-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (CPU_GROUPS / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


@asynccontextmanager
async def opened(what: Subject, places: Mapping[str, str], ray: RayNodes) -> AsyncIterator[OmniSystem]:
    """Open a pipeline with each stage on its node; no places: on this machine alone."""
    stages = {name: msgspec.structs.replace(stage, threads=1) for name, stage in what.pipeline.stages.items()}
    pipeline = msgspec.structs.replace(what.pipeline, stages=stages)
    if places:
        pipeline = msgspec.structs.replace(pipeline, cluster=Cluster(nodes=dict(places)))
    async with OmniSystem.open(pipeline, cluster=ray.address if places else None) as omni:
        yield omni


async def listen(omni: OmniSystem, what: Subject, into: list[tuple[float, float]]) -> None:
    """Read one answer. Adds the seconds to its first sound, and the seconds of its sound."""
    began, first, sound = time.monotonic(), None, 0.0
    async for output in omni.generate(**what.request):
        if isinstance(output.delta, AudioChunk):
            first = first or time.monotonic()
            sound += output.delta.duration_s
    assert first is not None
    into.append((first - began, sound))


async def measure(omni: OmniSystem, what: Subject) -> Figures:
    alone: list[tuple[float, float]] = []
    await listen(omni, what, alone)
    together: list[tuple[float, float]] = []
    began = time.monotonic()
    async with trio.open_nursery() as nursery:
        for _ in range(TOGETHER):
            nursery.start_soon(listen, omni, what, together)
    return Figures(alone[0][0], sum(sound for _, sound in together) / (time.monotonic() - began))


async def measure_pipeline(kind: str, what: Subject, ray: RayNodes, rounds: int) -> list[Round]:
    """Measure all layouts of a pipeline on each kind of line."""
    found = []
    async with AsyncExitStack() as stack:
        systems = {
            layout: await stack.enter_async_context(opened(what, places, ray))
            for layout, places in LAYOUTS[kind].items()
        }
        for line in LINES:
            with slow_lines(list(ray.nodes.values()), line.delay_s, line.bits_per_s) if line.is_slow else nullcontext():
                await trio.sleep(SETTLE_S)
                for omni in systems.values():
                    await listen(omni, what, [])
                for number in range(rounds):
                    order = [*list(systems)[number % len(systems) :], *list(systems)[: number % len(systems)]]
                    figures = {layout: await measure(systems[layout], what) for layout in order}
                    found.append(Round(kind, line.name, os.getloadavg()[0], figures))
            print(f"{kind}, {line.name}: load average {found[-1].load:.1f}", flush=True)
    return found


def markdown(rounds: Sequence[Round]) -> str:
    """Return a table: medians of the rounds, and medians of the ratios to one machine."""
    layouts = list(next(iter(LAYOUTS.values())))
    head = [f"{what}, {layout}" for what in ("first sound", "sound per second") for layout in layouts]
    lines = [f"| pipeline, line | {' | '.join(head)} |", "|---" * (1 + len(head)) + "|"]
    for key in dict.fromkeys((each.pipeline, each.line) for each in rounds):
        mine = [each for each in rounds if (each.pipeline, each.line) == key]
        cells = [_cell(mine, layout, "ttfa_s", 1000, " ms") for layout in layouts]
        cells += [_cell(mine, layout, "rate", 1, " s") for layout in layouts]
        lines.append(f"| {', '.join(key)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(rounds: Sequence[Round], layout: str, field: str, factor: float, unit: str) -> str:
    value = factor * statistics.median(getattr(each.figures[layout], field) for each in rounds)
    ratio = f" ({statistics.median(each.ratio(layout, field) for each in rounds):.2f})" if layout != ONE else ""
    return f"{value:.3g}{unit}{ratio}"


@click.command()
@click.option("--pipeline", "kinds", type=click.Choice(list(LAYOUTS)), multiple=True, default=("omni", "voice"))
@click.option("--rounds", default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures there.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write the table there.")
def main(kinds: Sequence[str], rounds: int, json_file: Path | None, markdown_file: Path | None) -> None:
    """Measure pipelines on one machine beside two and three network namespaces, on lines with delays and limits."""
    if (why := why_no_slow_lines()) is not None:
        raise click.ClickException(why)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # no namespace is left then either
    if not (grouped := CPU_GROUPS.is_dir()):
        print("no control groups (version 1): on a busy machine, layouts with more agents get more of the CPUs")
    found: list[Round] = []
    with one_control_group() if grouped else nullcontext(), tempfile.TemporaryDirectory() as directory:
        for kind in kinds:
            what = subject(kind, Path(directory))
            what = what._replace(request={**what.request, **LENGTHS[kind]})
            with namespaces(3) as nodes, ray_on(nodes, cpus=RAY_CPUS) as ray, nodes[0].entered():
                found += trio.run(partial(measure_pipeline, kind, what, ray, rounds))
    table = markdown(found)
    print(table)
    if markdown_file is not None:
        markdown_file.write_text(table, encoding="utf-8")
    if json_file is not None:
        data = {
            "cores": os.cpu_count(),
            "one_control_group": grouped,
            "together": TOGETHER,
            "rounds": msgspec.to_builtins(found),
        }
        json_file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
