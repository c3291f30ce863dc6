"""A working directory that is gone, or that has folders with the names of libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.readme import ROOT

WATCHDOG_S = 60.0
PROGRAM = (sys.executable, "-P", "-m", "omni_actors")
"""As the installed script runs: without the working directory on the import path."""
HIDING = """
import sys
class Hider:
    def find_spec(self, name, path=None, target=None):
        if name in {names!r}:
            from importlib.machinery import PathFinder
            return PathFinder.find_spec(name, [{folder!r}])
sys.meta_path.insert(0, Hider())
from omni_actors.cli import main
main({arguments!r}, prog_name="omni-actors")
"""
"""Finds some packages in one folder only, as a machine does on which they are not installed."""


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "1000"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=WATCHDOG_S, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["config", "list"], 0, "echo"),
        (["config", "explain", "echo"], 0, "stages.first.engine"),
        (["ask", "--config", "echo", "hello"], 1, "could not be created: [Errno 2] No such file or directory"),
        (["draw", "a cat"], 2, "cannot be written: No such file or directory"),
        (["ask", "--config", "echo", "hello", "-o", "answer.wav"], 2, "cannot be written: No such file or directory"),
        (["bench", "--url", "http://127.0.0.1:1"], 1, "the connection failed"),
        (["bench", "--json", "figures.json"], 2, "cannot be written: No such file or directory"),
    ],
)
def test_commands_run_in_a_directory_that_was_deleted(
    arguments: list[str], code: int, words: str, tmp_path: Path
) -> None:
    (gone := tmp_path / "gone").mkdir()
    done = run("sh", "-c", 'rmdir "$0" && exec "$@"', str(gone), *PROGRAM, *arguments, cwd=gone)
    assert "Traceback" not in done.stderr
    assert (done.returncode, words in done.stdout + done.stderr) == (code, True), done.stderr


def test_a_folder_is_no_library(tmp_path: Path) -> None:
    for name in ("vllm", "torch"):
        (tmp_path / name).mkdir()
    program = HIDING.format(names={"torch", "vllm"}, folder=str(tmp_path), arguments=["doctor", "voice", "--json"])
    done = run(sys.executable, "-c", program, cwd=tmp_path)
    assert "Traceback" not in done.stderr
    looked = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
    assert (looked["vllm"]["status"], looked["vllm"]["found"]) == ("warning", "not installed")
    assert looked["torch"]["found"] == "not installed"
    assert "torch import" not in looked
    assert "missing: torch" in looked["pipeline voice"]["found"]
