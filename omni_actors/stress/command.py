"""The command line: ``omni-actors stress`` and ``python -m omni_actors.stress``.

Exit codes: 0 without a violation; 1 with one, or if the pipeline does not start; 2 for an invalid configuration or
option.
"""

from __future__ import annotations

from pathlib import Path

import click

from omni_actors import config as configuration
from omni_actors.command_line import PIPELINE, Number, click_errors, override_option

AT_LEAST_1 = click.IntRange(min=1)


@click.command()
@click.argument("config", metavar="[PIPELINE]", default="echo", type=PIPELINE)
@click.option("--minutes", type=Number(min=0, min_open=True), help="Run for this long. [default: 1; with --soak 30]")
@click.option("--faults", type=AT_LEAST_1, help="Stop after this many faults.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the schedules. [default: random]")
@click.option("--operations", default=20, show_default=True, type=AT_LEAST_1, help="Most operations in a schedule.")
@click.option("--shrink-s", default=120.0, show_default=True, type=float, help="Time for shrinking a failing schedule.")
@click.option("--replay", metavar="SCHEDULE", help="Run this schedule only.")
@click.option("--times", default=1, show_default=True, type=AT_LEAST_1, help="How often to run that schedule.")
@click.option("--soak", is_flag=True, help="One system at full load, a fault every 2 s: memory and throughput.")
@click.option(
    "--cluster",
    metavar="NODES",
    help='Run the workers on nodes that share this machine, and hit these, too: "agents" starts two; or the address of '
    "a Ray cluster of this machine.",
)
@click.option("--simulate", type=AT_LEAST_1, help="Run this many schedules on simulated workers, in virtual time.")
@click.option(
    "--nodes",
    type=click.IntRange(min=100, max=1000),  # of fewer, the drawn labels and devices may leave a stage without a place
    help="With --simulate: run the workers on this many simulated nodes, which are lost and cut off.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write the figures to this file.",
)
@override_option
def stress_command(
    config: str,
    minutes: float | None,
    faults: int | None,
    seed: int | None,
    operations: int,
    shrink_s: float,
    replay: str | None,
    times: int,
    soak: bool,
    cluster: str | None,
    simulate: int | None,
    nodes: int | None,
    json_file: Path | None,
    assignments: tuple[str, ...],
) -> None:
    """Inject faults into the workers of PIPELINE while it serves.

    Outputs must equal those of a run without faults. Nothing may be lost, hang, come twice, or be left behind. A
    failing schedule is shrunk and printed as a command that repeats it.

    --simulate ignores PIPELINE: it draws its own pipelines, with simulated workers, in one process. The n-th schedule
    has the seed --seed + n.
    """
    if nodes is not None and simulate is None:
        raise click.UsageError("--nodes needs --simulate")
    from omni_actors.stress import campaign as campaigns  # slow to import; other commands do not need it

    if simulate is not None:
        if campaigns.simulate(simulate, seed, json_file, nodes=nodes or 0):
            raise SystemExit(1)
        return
    with click_errors(verbose=True):
        campaign = campaigns.Campaign(config, configuration.parse_overrides(assignments), json_file, cluster)
        if soak:
            violations = campaign.soak(minutes)
        elif replay is not None:
            violations = campaign.replay(replay, times)
        else:
            violations = campaign.search(minutes, faults, seed, operations, shrink_s)
    if violations:
        raise SystemExit(1)
