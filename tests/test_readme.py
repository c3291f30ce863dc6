"""Every command and program of the README does what it says.

The blocks run in the order of the page, in one empty directory, against one server where they need one. Commands of
`make` set a machine up; CI runs those, and here only that it does is checked.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import soundfile

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.partition("  #")[0].strip()
    for language, block in BLOCKS
    if language == "sh"
    for line in block.replace("\\\n", " ").splitlines()
]
PORT = 8091

pytestmark = pytest.mark.voice


def run(command: list[str] | str, where: Path, *, shell: bool = False) -> str:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=where, shell=shell, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def server(tmp_path: Path) -> Iterator[int]:
    """`omni-actors serve voice` on a free port, once it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    command = [str(Path(sys.executable).parent / "omni-actors"), "serve", "voice", "--port", str(port)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        try:
            wait_ready(process, f"http://127.0.0.1:{port}/health")
            yield port
        finally:
            process.send_signal(signal.SIGINT)
    assert process.returncode == 0


def wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Ask until it answers 200; pytest's own time limit is the watchdog."""
    while process.poll() is None:
        try:
            with urllib.request.urlopen(url):
                return
        except urllib.error.HTTPError as error:
            error.close()  # 503: it is loading
        except urllib.error.URLError:
            pass  # it does not listen yet
    pytest.fail(f"the server ended with code {process.returncode}")


def test_ci_runs_the_make_commands() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    made = [command for command in COMMANDS if command.startswith("make")]
    assert made == ["make demo", "make test", "make serve"]
    assert [command for command in made if not re.search(rf"^[^#]*{command}\b", ci, re.MULTILINE)] == []


def test_the_commands_do_what_they_say(tmp_path: Path, server: int) -> None:
    printed = {
        command: run(command.replace(str(PORT), str(server)), tmp_path, shell=True)
        for command in COMMANDS
        if not command.startswith("make")
    }
    assert len(printed) >= 7
    ask, ask_back, explain, _health, chat, speech, transcription = printed.values()
    assert "Paris" in ask
    assert soundfile.info(tmp_path / "answer.wav").duration > 1
    assert '"text":' in ask_back
    assert "stages.llm.threads" in explain
    assert "overrides" in explain
    assert "Paris" in chat
    assert speech == ""
    assert "good morning" in transcription.lower()


def test_the_programs_run(tmp_path: Path) -> None:
    programs = [block for language, block in BLOCKS if language == "python"]
    assert len(programs) == 1
    (tmp_path / "program.py").write_text(programs[0])
    assert "Paris" in "".join(re.findall(r"text (.*)", run([sys.executable, "program.py"], tmp_path)))
    for example in sorted((ROOT / "examples").glob("*.py")):
        assert run([sys.executable, str(example)], tmp_path)
    assert soundfile.info(tmp_path / "answer.wav").duration > 1
