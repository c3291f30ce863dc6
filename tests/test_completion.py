"""Shell completion, as a shell asks the program for it, and the version."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from omni_actors import __version__

PROGRAM = Path(sys.executable).parent / "omni-actors"


def run(*arguments: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    return subprocess.run([PROGRAM, *arguments], env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("omni-actors do", {"doctor"}),
        ("omni-actors config ", {"explain", "list", "schema"}),
        ("omni-actors doctor --j", {"--json"}),
        ("omni-actors serve --log-format j", {"json"}),
        ("omni-actors serve vo", {"voice", "voice_vllm"}),
        ("omni-actors doctor echo qwen_", {"qwen_image", "qwen_image_edit"}),
    ],
)
def test_the_program_completes_a_line(line: str, completions: set[str]) -> None:
    words = line.split()
    number = len(words) - (not line.endswith(" "))
    out = run(_OMNI_ACTORS_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=str(number))
    assert {entry.partition(",")[2] for entry in out.splitlines()} == completions


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script(shell: str) -> None:
    assert f"_OMNI_ACTORS_COMPLETE={shell}_complete" in run(_OMNI_ACTORS_COMPLETE=f"{shell}_source")


def test_version() -> None:
    assert run("--version").strip() == f"omni-actors, version {__version__}"
