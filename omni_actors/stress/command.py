"""The command line: ``omni-actors stress`` and ``python -m omni_actors.stress``.

Exit codes: 0 nothing was violated, 1 something was (or the pipeline does not run), 2 a configuration or an option that
cannot work.
"""

from __future__ import annotations

from pathlib import Path

import click

from omni_actors import config as configuration
from omni_actors.command_line import BadConfig, override_option
from omni_actors.errors import ConfigError, OmniError


@click.command()
@click.argument("config", default="echo")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="For how long. [default: 1; 30 to --soak]")
@click.option("--faults", type=click.IntRange(min=1), help="Until so many faults were injected.")
@click.option("--seed", type=click.IntRange(min=0), help="Of the schedules. [default: a new one each time]")
@click.option("--operations", default=20, show_default=True, type=click.IntRange(min=1), help="In a schedule, at most.")
@click.option("--shrink-s", default=120.0, show_default=True, type=float, help="Time to shrink a schedule that failed.")
@click.option("--replay", metavar="SCHEDULE", help="Carry out this schedule only.")
@click.option("--times", default=1, show_default=True, type=click.IntRange(min=1), help="How often to --replay.")
@click.option("--soak", is_flag=True, help="One system at full load, a fault every 2 s: memory and throughput.")
@click.option("--simulate", type=click.IntRange(min=1), help="So many schedules without processes, in virtual time.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write the figures here.",
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
    simulate: int | None,
    json_file: Path | None,
    assignments: tuple[str, ...],
) -> None:
    """Kill, stop, starve and crash the workers of the pipeline CONFIG, again and again, while it serves.

    Answers must equal those without a fault; nothing may be lost, hang, come twice, or be left behind. A schedule
    that fails is shrunk and printed as a command that repeats it.

    With --simulate, pipelines of its own with simulated workers, in one process; the n-th schedule is that of seed + n.
    """
    from omni_actors.stress import campaign as campaigns  # the runtime: other commands do not wait for its import

    if simulate is not None:
        if campaigns.simulate(simulate, seed, json_file):
            raise SystemExit(1)
        return
    try:
        campaign = campaigns.Campaign(config, configuration.parse_overrides(assignments), json_file)
        if soak:
            violations = campaign.soak(minutes)
        elif replay is not None:
            violations = campaign.replay(replay, times)
        else:
            violations = campaign.hunt(minutes, faults, seed, operations, shrink_s)
    except ConfigError as error:
        raise BadConfig(str(error)) from error
    except OmniError as error:
        raise click.ClickException(str(error)) from error
    if violations:
        raise SystemExit(1)
