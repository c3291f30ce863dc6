"""The files of deploy/: what can be checked of them without a container engine and without a running systemd."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from omni_actors.serve.command import serve_command
from tests.support.readme import ROOT

DEPLOY = ROOT / "deploy"
UNIT = (DEPLOY / "omni-actors.service").read_text(encoding="utf-8")
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
ENVIRONMENT = dict(
    line.split("=", 1) for line in (DEPLOY / "omni-actors.env").read_text().splitlines() if line and line[0] != "#"
)


def unit_command() -> list[str]:
    """Return the command line of the unit, with the variables of its environment file."""
    [line] = re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)
    return [re.sub(r"^\$(\w+)$", lambda found: ENVIRONMENT[found[1]], word) for word in shlex.split(line)]


def arguments_of(command: list[str]) -> list[str]:
    """Return what follows "omni-actors serve"."""
    assert Path(command[0]).name == "omni-actors"
    assert command[1] == "serve"
    return command[2:]


def test_the_program_accepts_the_command_lines() -> None:
    [in_shell] = re.findall(r'^CMD \["sh", "-c", "exec (.*)"\]$', DOCKERFILE, re.MULTILINE)
    image = shlex.split(in_shell.replace('\\"$PIPELINE\\"', "voice"))
    for command in (unit_command(), image):
        context = serve_command.make_context("serve", arguments_of(command))
        assert isinstance(context, click.Context)
        assert (context.params["configs"], context.params["port"]) == (("voice",), 8091)
        assert context.params["exit_on_failed_stage"]


@pytest.mark.slow
def test_the_unit_is_valid(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd is not installed")
    program = Path(sys.executable).parent / "omni-actors"
    unit = tmp_path / "omni-actors.service"
    unit.write_text(UNIT.replace("/opt/omni-actors/bin/omni-actors", str(program)))
    done = subprocess.run([analyze, "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    complaints = [line for line in done.stderr.splitlines() if "omni-actors" in line]
    assert complaints == []


@pytest.mark.slow
def test_the_command_of_the_unit_serves_and_drains() -> None:
    """The command runs with another pipeline and a free port; all else is the unit's."""
    _, *arguments = unit_command()
    arguments = [{"voice": "echo", "8091": "0"}.get(word, word) for word in arguments]
    process = subprocess.Popen(
        [sys.executable, "-m", "omni_actors", *arguments],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        assert any('"event": "server_ready"' in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(60) == 0


def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    copied = [word for line in re.findall(r"^COPY (?!--)(.*)$", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]]
    assert len(copied) >= 7
    assert not [name for name in copied if not (ROOT / name).exists()]
    allowed = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert not [name for name in copied if f"!{name}" not in allowed]


def test_a_changed_source_file_does_not_install_the_libraries_again() -> None:
    """A layer of an image is built again when a line before it copied a changed file."""
    steps = re.sub(r"\\\n", " ", DOCKERFILE).splitlines()
    [libraries] = [step for step in steps if "-c requirements/constraints.txt" in step]
    [sources] = [step for step in steps if step.startswith("COPY omni_actors ")]
    assert steps.index(libraries) < steps.index(sources)


def test_the_image_installs_the_libraries_of_its_extras() -> None:
    [script] = re.findall(r"^RUN (python -c .*?) > /libraries.txt", DOCKERFILE, re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        ["/bin/sh", "-c", script],
        cwd=ROOT,
        env={**os.environ, "EXTRAS": "voice,cluster", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    names = done.stdout.splitlines()
    assert {"trio", "faster-whisper", "ray==2.60.0"} <= set(names)
    assert "vllm" not in names
