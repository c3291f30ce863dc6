"""The command line: ``omni-actors stress`` and ``python -m omni_actors.stress``.

Exit codes: 0 without a violation; 1 with one, or if the pipeline does not start; 2 for an invalid configuration or
option.
"""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from omni_actors import config as configuration
from omni_actors.command_line import PIPELINE, Number, click_errors, override_option, require_writable

AT_LEAST_1 = click.IntRange(min=1)
SHARED = {"cluster", "json_file", "assignments"}
MODES = {
    "simulate": {"seed", "nodes", "json_file"},
    "soak": {"minutes", *SHARED},
    "replay": {"times", *SHARED},
}
"""The parameters that have an effect in each mode. Without one of these options, the command searches."""


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
@click.pass_context
def stress_command(
    context: click.Context,
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
    _refuse_options_without_effect(context)
    if json_file is not None:
        require_writable(json_file, "--json")
    from omni_actors.stress import campaign as campaigns  # slow to import; other commands do not need it

    with click_errors(verbose=True):
        if simulate is not None:
            if campaigns.simulate(simulate, seed, json_file, nodes=nodes or 0):
                raise SystemExit(1)
            return
        campaign = campaigns.Campaign(config, configuration.parse_overrides(assignments), json_file, cluster)
        if soak:
            violations = campaign.soak(minutes)
        elif replay is not None:
            violations = campaign.replay(replay, times)
        else:
            violations = campaign.search(minutes, faults, seed, operations, shrink_s)
    if violations:
        raise SystemExit(1)


def _refuse_options_without_effect(context: click.Context) -> None:
    options = [each for each in context.command.params if isinstance(each, click.Option)]
    names = {
        str(each.name): each.opts[-1]
        for each in options
        if context.get_parameter_source(str(each.name)) is ParameterSource.COMMANDLINE
    }
    mode = next((each for each in MODES if each in names), None)
    for name, option in names.items():
        if mode is not None and name != mode and name not in MODES[mode]:
            raise click.UsageError(f"{option} cannot be used with --{mode}")
        if mode is None and name in ("nodes", "times"):
            raise click.UsageError(f"{option} needs --{'simulate' if name == 'nodes' else 'replay'}")
