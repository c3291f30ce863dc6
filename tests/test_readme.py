"""The commands of the README work.

They run in the order of the page, in one empty directory, against a server that other tests use too. The `make`
commands set up a machine; CI runs them, and a test here checks that it does. test_voice.py runs the first program
and the example.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import soundfile

from tests.support.readme import ASKED, COMMANDS, LISTENING, PAGE, ROOT

PORT = 8091

pytestmark = pytest.mark.voice


@pytest.fixture(autouse=True)
def one_core() -> Iterator[None]:
    """Run on one core: beside other tests, two threads of a language model mostly wait for each other."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


def run(command: list[str] | str, where: Path, *, shell: bool = False) -> str:
    temporary = where / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NO_COLOR": "1",
        "TMPDIR": str(temporary),
    }
    done = subprocess.run(command, cwd=where, shell=shell, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert list(temporary.iterdir()) == [], "no library leaves files"
    return done.stdout


def test_ci_runs_the_make_commands(tmp_path: Path) -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    made = [command for command in COMMANDS if command.startswith("make")]
    assert made == ["make demo", 'make demo-image PROMPT="a green star"', "make test", "make serve"]
    found = [re.search(rf"^[^#\n]*{re.escape(command)}(?![\w-])", ci, re.MULTILINE) for command in made]
    assert None not in found, dict(zip(made, found, strict=True))
    demo = run(["make", "--dry-run", "--directory", str(ROOT), "demo"], tmp_path)
    assert ASKED.removeprefix("omni-actors") in demo


@pytest.mark.slow
def test_the_commands_print_what_the_page_promises(tmp_path: Path, voice_url: str) -> None:
    assert f"`omni-actors serve voice --port {PORT}`" in PAGE, "the server of ``voice_url``"
    port = voice_url.rpartition(":")[2]
    say = {"model": "voice", "voice": "heart", "input": "Paris is the capital of France.", "response_format": "wav"}
    (tmp_path / "answer.wav").write_bytes(httpx.post(f"{voice_url}/v1/audio/speech", json=say, timeout=60).content)
    printed = {
        command: run(command.replace(str(PORT), port), tmp_path, shell=True)
        for command in COMMANDS
        if not command.startswith("make") and command != ASKED
    }
    assert len(printed) >= 7
    ask_back, explain, _health, chat, speech, transcription, simulated = printed.values()
    assert re.search(r'"text": *"\w', ask_back)
    assert "stages.llm.threads" in explain
    assert "--set" in explain
    assert "| **all** |" in simulated
    assert "Paris" in chat
    assert speech == ""
    assert "good morning" in transcription.lower()


@pytest.mark.slow
def test_the_program_that_hears_a_recording_answers(tmp_path: Path) -> None:
    samples, rate = soundfile.read(ROOT / "examples" / "media" / "capital.ogg", dtype="float32")
    soundfile.write(tmp_path / "answer.wav", samples, rate)
    assert "Paris" in run([sys.executable, "-c", LISTENING], tmp_path)
