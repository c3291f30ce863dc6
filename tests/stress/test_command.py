"""The command line, as a user has it: what it prints, writes, and ends with."""

from __future__ import annotations

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
    ],
)
def test_invalid_arguments_give_exit_code_2(
    stress: Callable[..., Result], arguments: tuple[str, ...], words: str
) -> None:
    done = stress(*arguments)
    assert done.exit_code == 2, done.output
    assert words in done.stderr
