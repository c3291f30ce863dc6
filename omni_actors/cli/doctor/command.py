"""The command ``omni-actors doctor``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

import click
import msgspec
from rich.console import Console
from rich.text import Text

from omni_actors.cli.doctor import libraries, machine
from omni_actors.cli.doctor.findings import Finding
from omni_actors.command_line import PIPELINE, echo_json
from omni_actors.plain_text import clean
from omni_actors.serve.settings import DEFAULTS

STYLES = {"OK": "green", "warning": "yellow", "error": "bold red"}


@click.command()
@click.argument("pipelines", nargs=-1, type=PIPELINE)
@click.option("--port", type=click.IntRange(1, 65535), default=DEFAULTS.port, show_default=True, help="Of a server.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def doctor(pipelines: tuple[str, ...], port: int, as_json: bool) -> None:
    """Report what this machine has and lacks for omni_actors, and for the PIPELINES.

    Each line is OK, a warning (some pipelines do not work, or work slowly) or an error, with what to do. The exit code
    is 1 if there is an error, else 0.
    """
    checks = _checks(pipelines, port)
    if as_json:
        found = list(checks)
        report = {"errors": _count(found, "error"), "warnings": _count(found, "warning"), "findings": found}
        echo_json(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        found = _print(checks)
    if _count(found, "error"):
        sys.exit(1)


def _checks(pipelines: Sequence[str], port: int) -> Iterator[Finding]:
    yield from machine.check(port)
    yield from libraries.check()
    if machine.is_linux():
        from omni_actors.cli.doctor import models  # imports the runtime

        yield from models.check(pipelines)


def _print(checks: Iterable[Finding]) -> list[Finding]:
    """Print each finding as soon as it is there, and return them all."""
    console = Console(highlight=False, soft_wrap=True)
    found: list[Finding] = []
    for finding in checks:
        if not found or found[-1].group != finding.group:
            console.print(Text(finding.group, style="bold"))
        found.append(finding)
        found_text = clean(finding.found, keep_lines=True)
        line = Text.assemble((f"  {finding.status:8}", STYLES[finding.status]), f"{finding.name:17} {found_text}")
        console.print(line)
        if finding.remedy:
            console.print(Text(f"{'':28}→ {finding.remedy}", style="dim"))
    counts = ((_count(found, status), status) for status in ("error", "warning"))
    console.print(", ".join(f"{count} {status}{'' if count == 1 else 's'}" for count, status in counts))
    return found


def _count(found: Sequence[Finding], status: str) -> int:
    return sum(each.status == status for each in found)
