"""The command line, as a user has it: what it prints, writes, and ends with."""

from __future__ import annotations

import errno
import importlib.util
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from omni_actors.cli import main
from omni_actors.stress import campaign
from omni_actors.stress.workload import Workload
from tests.stress.patience import PATIENT

SCHEDULE = '["idle",null,[["kill",["second"]],["settle"]]]'
"""The only request is the harness's own, after the restart, so every run finds the same."""


@pytest.fixture
def stress(monkeypatch: pytest.MonkeyPatch, mark: str, baseline: Workload) -> Callable[..., Result]:
    """Runs `omni-actors stress …` with the baseline's answers, so that they are not computed again."""

    def known(workload: Workload) -> None:
        workload.oracle = baseline.oracle

    monkeypatch.setattr(campaign, "ask_oracle", known)
    patient = [f"--set={path}={value}" for path, value in PATIENT.items()]
    return lambda config, *arguments: CliRunner().invoke(main, ["stress", config, *patient, *arguments])


@pytest.mark.slow
def test_a_search_ends_with_its_budget_and_writes_figures(stress: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = stress("echo", "--faults", "1", "--operations", "2", "--seed", "18", "--json", str(file))
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("| fault | load | N | lost |")
    figures: dict[str, Any] = json.loads(file.read_bytes())
    assert (figures["config"], figures["seed"], figures["violations"]) == ("echo", 18, 0)
    assert figures["faults"] >= 1


@pytest.mark.slow
def test_a_violation_gives_exit_code_1_and_a_command_that_repeats_it(
    stress: Callable[..., Result], planted: Callable[[str], Workload]
) -> None:
    options = planted("Louder").pipeline.stages["second"].options
    overrides = [
        "--set=stages.second.engine=planted_engines:Louder",
        "--set=stages.second.deterministic=true",
        f"--set=stages.second.options={json.dumps(dict(options))}",
    ]
    done = stress("echo", *overrides, "--replay", SCHEDULE)
    assert done.exit_code == 1, done.output
    assert "violated: corrupted: " in done.stderr
    command = shlex.split(done.stderr.strip().splitlines()[-1])
    assert command[:4] == ["python", "-m", "omni_actors.stress", "echo"]
    Path(options["marker"]).unlink()
    again = stress(*command[3:])
    assert again.exit_code == 1
    assert re.findall("violated: corrupted: [^(]*", again.stderr) == re.findall(
        "violated: corrupted: [^(]*", done.stderr
    )


def test_without_hypothesis_the_error_names_the_command_that_installs_it(
    stress: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "hypothesis" else find_spec(name))
    done = stress("echo")
    assert done.exit_code == 1
    assert "pip install hypothesis" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("echo", "--replay", "[1]"), "--replay"),
        (("echo", "--replay", '["idle",null,[["kill",["third"]]]]'), "'third'"),
        (("echo", "--replay", '["idle",null,[["submit","poem"]]]'), "'poem'"),
        (("no_such_pipeline",), "no_such_pipeline"),
        (("echo", "--set", "stages.first.step_timeout_s=0"), "step_timeout_s"),
        (("echo", "--json", "nowhere/figures.json"), "there is no directory nowhere"),
    ],
)
def test_invalid_arguments_give_exit_code_2(
    stress: Callable[..., Result], arguments: tuple[str, ...], words: str
) -> None:
    done = stress(*arguments)
    assert done.exit_code == 2, done.output
    assert words in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--simulate", "1", "--soak"), "--soak cannot be used with --simulate"),
        (("--simulate", "1", "--minutes", "1"), "--minutes cannot be used with --simulate"),
        (("--simulate", "1", "--cluster", "agents"), "--cluster cannot be used with --simulate"),
        (("--soak", "--replay", SCHEDULE), "--replay cannot be used with --soak"),
        (("--soak", "--seed", "1"), "--seed cannot be used with --soak"),
        (("--replay", SCHEDULE, "--faults", "1"), "--faults cannot be used with --replay"),
        (("--simulate", "1", "--set", "stages.first.threads=2"), "--set cannot be used with --simulate"),
        (("--times", "2"), "--times needs --replay"),
        (("--nodes", "100"), "--nodes needs --simulate"),
        (("--simulate", "1", "--json", "nowhere/figures.json"), "there is no directory nowhere"),
    ],
)
def test_options_that_cannot_work_are_refused(arguments: tuple[str, ...], words: str) -> None:
    done = CliRunner().invoke(main, ["stress", *arguments])
    assert done.exit_code == 2, done.output
    assert words in done.stderr


def test_figures_that_cannot_be_written_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is read-only when the run ends."""

    def refuse(path: Path, data: bytes) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    done = CliRunner().invoke(main, ["stress", "--simulate", "1", "--seed", "1", "--json", str(tmp_path / "figures")])
    assert (done.exit_code, "Traceback" in done.output) == (1, False)
    assert "figures cannot be written: Permission denied" in " ".join(done.stderr.split())
