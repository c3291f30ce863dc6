"""Files and streams that cannot be written: it is said in one sentence, and before the work where that is known."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from omni_actors.cli import main
from tests.support.readme import ROOT

FULL = Path("/dev/full")
WATCHDOG_S = 60.0
PROGRAM = (sys.executable, "-m", "omni_actors")


@pytest.fixture
def speaking(tmp_path: Path) -> Path:
    """A pipeline that repeats a question, and speaks it."""
    path = tmp_path / "speaking.yaml"
    path.write_text("""\
name: speaking
stages:
  mind: {engine: echo, accepts: [messages], emits: text}
  mouth: {engine: "tests.support.served_engines:Speaker", inputs: [mind], emits: audio}
""")
    return path


@pytest.fixture
def painting(tmp_path: Path) -> Path:
    """A pipeline that paints."""
    path = tmp_path / "painting.yaml"
    engine = "tests.support.painting_engine:PaintingEngine"
    stage = f'{{engine: "{engine}", accepts: [messages, image], emits: image, options: {{size: 24x16}}}}'
    path.write_text(f"name: painting\nstages: {{painter: {stage}}}\n")
    return path


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


@pytest.mark.parametrize(
    ("place", "reason"),
    [("/proc/answer.wav", "/proc/answer.wav cannot be written"), ("/no/such/answer.wav", "there is no directory")],
)
def test_a_place_that_cannot_be_written_ends_before_anything_starts(place: str, reason: str, speaking: Path) -> None:
    result = invoke("ask", "--config", speaking, "hello", "-o", place)
    assert result.exit_code == 2
    assert reason in " ".join(result.stderr.split())
    assert "ready" not in result.stderr


def test_a_place_that_can_be_written_stays_as_it_was(tmp_path: Path, speaking: Path) -> None:
    (kept := tmp_path / "kept.wav").write_bytes(b"words")
    for path in (kept, tmp_path / "new.wav"):
        assert invoke("ask", "--config", speaking, "unspeakable", "-o", path).exit_code == 1
    assert kept.read_bytes() == b"words"
    assert not (tmp_path / "new.wav").exists()


def test_an_answer_whose_sound_cannot_be_written_is_printed_and_a_failure(speaking: Path, tmp_path: Path) -> None:
    (output := tmp_path / "answer.wav").symlink_to(FULL)
    result = invoke("ask", "--config", speaking, "hello", "-o", output)
    assert (result.exit_code, result.stdout) == (1, "hello\n")
    assert isinstance(result.exception, SystemExit), "no traceback"
    assert f"{output} cannot be written: " in result.stderr


def test_a_rate_that_the_format_does_not_have_leaves_no_file(speaking: Path, tmp_path: Path) -> None:
    engine = "stages.mouth.engine=tests.cli.odd_speaker:OddSpeaker"
    result = invoke("ask", "--config", speaking, "hello", "-s", engine, "-o", tmp_path / "answer.mp3")
    assert (result.exit_code, result.stdout) == (1, "hello\n")
    assert isinstance(result.exception, SystemExit), "no traceback"
    assert "only supports sample rates of" in " ".join(result.stderr.split())
    assert not (tmp_path / "answer.mp3").exists()


def test_a_picture_that_cannot_be_written_is_one_sentence(painting: Path, tmp_path: Path) -> None:
    (output := tmp_path / "cat.png").symlink_to(FULL)
    result = invoke("draw", "a cat", "--config", painting, "-o", output)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), "no traceback"
    assert f"{output} cannot be written: No space left on device" in result.stderr


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    "command", [["ask", "--config", "echo", "hello"], ["config", "list"], ["--help"], ["--version"]]
)
def test_a_full_disk_behind_standard_output_is_one_sentence(command: list[str], buffered: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({} if buffered else {"PYTHONUNBUFFERED": "1"})
    with FULL.open("w") as output:
        done = subprocess.run(
            [*PROGRAM, *command],
            stdout=output,
            stderr=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
            text=True,
            timeout=WATCHDOG_S,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "Error: the output cannot be written: No space left on device"
    assert "Traceback" not in done.stderr
