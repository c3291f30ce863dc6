"""The modes of the command: a search for failing schedules, a replay of one schedule, a soak, and simulations.

Figures go to stdout as Markdown, and to a file as JSON. Progress, violations and the command that repeats a failure go
to stderr.
"""

from __future__ import annotations

import os
import random
import shlex
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from omni_actors.command_line import CannotWrite
from omni_actors.installed import is_importable
from omni_actors.stress import leaks
from omni_actors.stress import schedule as schedules
from omni_actors.stress.judge import Violation
from omni_actors.stress.report import Tally
from omni_actors.stress.run import ask_oracle, run_schedule
from omni_actors.stress.simulation.journal import Journal
from omni_actors.stress.soak import soak
from omni_actors.stress.workload import workload_of

MINUTES, SOAK_MINUTES = 1.0, 30.0
notes = Console(stderr=True, highlight=False)


class Campaign:
    """Runs against one pipeline. Each method returns the violations that it found."""

    def __init__(
        self, config: str, overrides: Mapping[str, Any], json_file: Path | None, cluster: str | None = None
    ) -> None:
        """Run each request once without faults and without nodes, for the oracle. Raises ConfigError, StageFailed.

        cluster: see ``Workload``.
        """
        self._config, self._overrides, self._json_file = config, overrides, json_file
        self._mark = os.environ[leaks.MARKER] = uuid.uuid4().hex
        self._workload = workload_of(config, overrides)
        self._workload.cluster = cluster
        with notes.status("running the requests without faults"):
            ask_oracle(self._workload)

    def search(
        self, minutes: float | None, faults: int | None, seed: int | None, operations: int, shrink_s: float
    ) -> Sequence[Violation]:
        """Run generated schedules until the time is up, ``faults`` were injected, or one fails.

        minutes: None without ``faults`` means ``MINUTES``. seed: None draws one. operations: most in a schedule.
        shrink_s: time for shrinking a failing schedule. Raises click.ClickException if Hypothesis is missing.
        """
        if not is_importable("hypothesis"):
            message = (
                "Hypothesis generates the schedules, and is not installed: pip install hypothesis (the extra stress)"
            )
            raise click.ClickException(message)
        from omni_actors.stress.search import Search

        seed = _seed(seed)
        limit_s = 60 * (MINUTES if minutes is None and faults is None else minutes or float("inf"))
        began = time.monotonic()

        def enough() -> bool:
            return time.monotonic() - began >= limit_s or (faults is not None and search.tally.faults >= faults)

        def run(schedule: schedules.Schedule) -> Tally:
            progress = _summary(search.tally)
            if search.failing is not None:
                progress = f"[red]violated[/]; shrinking: {len(search.failing.operations)} operations"
            status.update(f"seed {seed}, {time.monotonic() - began:.0f} s: {progress}")
            return run_schedule(self._workload, schedule, self._mark)

        search = Search(self._workload, run, enough, shrink_s)
        with notes.status(f"seed {seed}") as status:
            search.go(seed, operations)
        how = {"seed": seed, "operations": operations, "seconds": time.monotonic() - began}
        self._report(search.tally, how)
        notes.print(f"seed {seed}")
        self._print_violations(search.violations, search.failing)
        return search.violations

    def replay(self, text: str, times: int) -> Sequence[Violation]:
        """Run one schedule ``times`` times. Raises click.BadParameter if it does not fit the pipeline."""
        schedule = self._read(text)
        tally = Tally()
        for number in range(times):
            with notes.status(f"run {number + 1} of {times}"):
                tally.add(run_schedule(self._workload, schedule, self._mark))
        self._report(tally, {"replay": schedules.encode(schedule), "times": times})
        self._print_violations(tally.found, schedule)
        return tally.found

    def soak(self, minutes: float | None) -> Sequence[Violation]:
        """Run the soak. minutes: None means ``SOAK_MINUTES``."""
        with notes.status("soaking") as status:
            seconds = 60 * (minutes or SOAK_MINUTES)
            soaked = soak(self._workload, seconds, self._mark, lambda facts: status.update(f"soaking: {facts}"))
        click.echo(soaked.as_markdown())
        self._write(soaked.as_json())
        self._print_violations(soaked.tally.found, None)
        return soaked.tally.found

    def _read(self, text: str) -> schedules.Schedule:
        try:
            schedule = schedules.decode(text)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise click.BadParameter(str(error), param_hint="--replay") from error
        unknown = (schedules.stages_of(schedule) - set(self._workload.stages)) | (
            schedules.requests_of(schedule) - self._workload.templates.keys()
        )
        if unknown:
            raise click.BadParameter(f"this pipeline has no {sorted(unknown)[0]!r}", param_hint="--replay")
        return schedule

    def _report(self, tally: Tally, how: Mapping[str, Any]) -> None:
        click.echo(tally.as_markdown())
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(tally.requests.items()))
        notes.print(f"{_summary(tally)} ({outcomes})")
        self._write({**how, **tally.as_json()})

    def _write(self, figures: Mapping[str, Any]) -> None:
        what = {"config": self._config, "overrides": self._overrides, "cluster": self._workload.cluster}
        _write_json(self._json_file, {**what, **figures})

    def _print_violations(self, violations: Sequence[Violation], failing: schedules.Schedule | None) -> None:
        _print_violations(violations)
        if violations and failing is not None:
            values = {path: msgspec.json.encode(value).decode() for path, value in self._overrides.items()}
            overrides = [f"--set={path}={value}" for path, value in values.items()]
            command = ["python", "-m", "omni_actors.stress", self._config, *overrides]
            if self._workload.cluster is not None:
                command.append(f"--cluster={self._workload.cluster}")
            again = shlex.join([*command, "--replay", schedules.encode(failing)])
            click.echo(f"repeat it with (processes race: add --times 20):\n{again}", err=True)


def simulate(schedules: int, seed: int | None, json_file: Path | None, nodes: int = 0) -> Sequence[Violation]:
    """Simulate the schedules of the seeds from ``seed`` on. Returns the violations.

    nodes: how many nodes there are; 0: one machine.
    """
    from omni_actors.stress.simulation import simulation

    first, tally = _seed(seed), Tally()
    failed: Journal | None = None
    began = time.monotonic()
    with notes.status("simulating") as status:
        for number in range(schedules):
            journal = simulation.simulate(first + number, nodes)
            tally.add(journal.tally)
            failed = failed or (journal if journal.tally.found else None)
            if number % 100 == 0:
                status.update(f"simulating: {_summary(tally)}")
    seconds = time.monotonic() - began
    click.echo(tally.as_markdown())
    notes.print(f"{_summary(tally)}, {60 * schedules / seconds:.0f} schedules a minute; times in the table are virtual")
    _write_json(
        json_file, {"simulated": schedules, "nodes": nodes, "seed": first, "seconds": seconds, **tally.as_json()}
    )
    if failed is not None:
        click.echo("\n".join(failed.log), err=True)
        _print_violations(failed.tally.found)
        again = f"python -m omni_actors.stress --simulate 1 --seed {failed.seed}" + f" --nodes {nodes}" * bool(nodes)
        click.echo(f"repeat it with:\n{again}", err=True)
    return tally.found


def _seed(given: int | None) -> int:
    return random.SystemRandom().randrange(1 << 32) if given is None else given


def _write_json(file: Path | None, figures: Mapping[str, Any]) -> None:
    """Write the figures. Raises CannotWrite."""
    if file is not None:
        try:
            file.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1))
        except OSError as error:
            raise CannotWrite(file, error) from error


def _print_violations(violations: Sequence[Violation]) -> None:
    for violation in violations:
        click.echo(f"violated: {violation}", err=True)


def _summary(tally: Tally) -> str:
    return f"{tally.runs} runs, {tally.faults} faults, {len(tally.found)} violations, {tally.requests.total()} requests"
