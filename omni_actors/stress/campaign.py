"""The modes of the command: a search for failing schedules, a replay of one schedule, a soak, and simulations.

Figures go to stdout as Markdown, and to a file as JSON. Progress, violations and the command that repeats a failure go
to stderr.
"""

from __future__ import annotations

import importlib.util
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
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from omni_actors.stress import leaks
from omni_actors.stress import schedule as schedules
from omni_actors.stress.judge import Violation
from omni_actors.stress.report import Tally
from omni_actors.stress.run import Result, ask_oracle, run_schedule
from omni_actors.stress.soak import soak
from omni_actors.stress.workload import workload_of

MINUTES, SOAK_MINUTES = 1.0, 30.0
notes = Console(stderr=True, highlight=False)


class Campaign:
    """Runs against one pipeline. Each method returns the violations that it found."""

    def __init__(self, config: str, overrides: Mapping[str, Any], json_file: Path | None) -> None:
        """Run each request once without faults, for the oracle. Raises ConfigError, StageFailed."""
        self._config, self._overrides, self._json_file = config, overrides, json_file
        self._mark = os.environ[leaks.MARKER] = uuid.uuid4().hex
        self._workload = workload_of(config, overrides)
        with notes.status("running the requests without faults"):
            ask_oracle(self._workload)

    def search(
        self, minutes: float | None, faults: int | None, seed: int | None, operations: int, shrink_s: float
    ) -> Sequence[Violation]:
        """Run generated schedules until the time is up, ``faults`` were injected, or one fails.

        minutes: None without ``faults`` means ``MINUTES``. seed: None draws one. operations: most in a schedule.
        shrink_s: time for shrinking a failing schedule. Raises click.ClickException if Hypothesis is missing.
        """
        if importlib.util.find_spec("hypothesis") is None:
            raise click.ClickException(
                "Hypothesis generates the schedules, and is not installed: pip install hypothesis (the extra stress)"
            )
        from omni_actors.stress.state_machine import Search

        seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
        limit_s = 60 * (MINUTES if minutes is None and faults is None else minutes or float("inf"))
        began = time.monotonic()

        def enough() -> bool:
            return time.monotonic() - began >= limit_s or (faults is not None and search.tally.faults >= faults)

        with Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=notes
        ) as progress:
            task = progress.add_task(f"seed {seed}")

            def run(schedule: schedules.Schedule) -> Result:
                description = _summary(search.tally)
                if search.failing is not None:
                    description = f"[red]violated[/]; shrinking: {len(search.failing.operations)} operations"
                progress.update(task, description=f"seed {seed}: {description}")
                return run_schedule(self._workload, schedule, self._mark)

            search = Search(self._workload, run, enough, shrink_s)
            search.go(seed, operations)
        how = {"seed": seed, "operations": operations, "seconds": time.monotonic() - began}
        self._report(search.tally, how)
        notes.print(f"seed {seed}")
        self._print_violations(search.violations, search.failing)
        return search.violations

    def replay(self, text: str, times: int) -> Sequence[Violation]:
        """Run one schedule ``times`` times. Raises click.BadParameter if it does not fit the pipeline."""
        schedule = self._read(text)
        tally, violations = Tally(), []
        for number in range(times):
            with notes.status(f"run {number + 1} of {times}"):
                result = run_schedule(self._workload, schedule, self._mark)
            tally.add(result.tally)
            violations += result.violations
        self._report(tally, {"replay": schedules.encode(schedule), "times": times})
        self._print_violations(violations, schedule)
        return violations

    def soak(self, minutes: float | None) -> Sequence[Violation]:
        """Run the soak. minutes: None means ``SOAK_MINUTES``."""
        with notes.status("soaking") as status:
            soaked = soak(
                self._workload,
                60 * (minutes or SOAK_MINUTES),
                self._mark,
                lambda summary: status.update(f"soaking: {summary}"),
            )
        click.echo(soaked.as_markdown())
        self._write(soaked.as_json())
        self._print_violations(soaked.result.violations, None)
        return soaked.result.violations

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
        if self._json_file is not None:
            document = {"config": self._config, "overrides": self._overrides, **figures}
            self._json_file.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))

    def _print_violations(self, violations: Sequence[Violation], failing: schedules.Schedule | None) -> None:
        for violation in violations:
            click.echo(f"violated: {violation}", err=True)
        if violations and failing is not None:
            overrides = [
                f"--set={path}={msgspec.json.encode(value).decode()}" for path, value in self._overrides.items()
            ]
            command = ["python", "-m", "omni_actors.stress", self._config, *overrides]
            again = shlex.join([*command, "--replay", schedules.encode(failing)])
            click.echo(f"repeat it with (processes race: add --times 20):\n{again}", err=True)


def simulate(schedules: int, seed: int | None, json_file: Path | None) -> Sequence[Violation]:
    """Simulate the schedules of the seeds from ``seed`` on. Returns the violations."""
    from omni_actors.stress.simulation import simulation

    first = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    tally, violations = Tally(), list[Violation]()
    failed: simulation.Result | None = None
    began = time.monotonic()
    with notes.status("simulating") as status:
        for number in range(schedules):
            result = simulation.simulate(first + number)
            tally.add(result.tally)
            violations += result.violations
            failed = failed or (result if result.violations else None)
            if number % 100 == 0:
                status.update(f"simulating: {_summary(tally)}")
    seconds = time.monotonic() - began
    click.echo(tally.as_markdown())
    notes.print(f"{_summary(tally)}, {60 * schedules / seconds:.0f} schedules a minute; times in the table are virtual")
    if json_file is not None:
        figures = {"simulated": schedules, "seed": first, "seconds": seconds, **tally.as_json()}
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1))
    if failed is not None:
        click.echo("\n".join(failed.log), err=True)
        for violation in failed.violations:
            click.echo(f"violated: {violation}", err=True)
        click.echo(f"repeat it with:\npython -m omni_actors.stress --simulate 1 --seed {failed.seed}", err=True)
    return violations


def _summary(tally: Tally) -> str:
    return f"{tally.runs} runs, {tally.faults} faults, {tally.violations} violations, {tally.requests.total()} requests"
