"""Arguments that no request can carry: they are refused before anything is sent or started."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from omni_actors.cli import main

NO_TEXT = "a\udcff"
"""How Python reads an argument with a byte that is not UTF-8."""
NO_SERVER = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    "arguments",
    [
        ["chat", "--url", NO_TEXT],
        ["chat", "--url", f"{NO_SERVER}/{NO_TEXT}"],
        *(["chat", "--url", NO_SERVER, option, NO_TEXT] for option in ("--model", "--system", "--voice")),
        *(["bench", "--url", NO_SERVER, option, NO_TEXT] for option in ("--model", "--voice")),
        ["top", "--once", "--url", NO_SERVER, "--pipeline", NO_TEXT],
    ],
)
def test_bytes_that_are_no_text_are_a_wrong_argument(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert r"a\udcff' is not text in UTF-8" in result.stderr


@pytest.mark.parametrize("extra", ['{"a": "\udcff"}', '{"a": ' + "[" * 5000])
def test_fields_that_cannot_be_decoded_are_a_wrong_argument(extra: str) -> None:
    result = CliRunner().invoke(main, ["bench", "--url", NO_SERVER, "--extra", extra])
    assert result.exit_code == 2
    assert "not a JSON object" in result.stderr
    assert len(result.stderr) < 1000


def test_a_line_of_a_dataset_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    (dataset := tmp_path / "deep.jsonl").write_text('{"messages": [{"content": ' + "[" * 5000 + "\n")
    result = CliRunner().invoke(main, ["bench", "--url", NO_SERVER, "--dataset", str(dataset)])
    assert result.exit_code == 2
    assert "deep.jsonl:1: " in result.stderr


def test_a_dataset_that_is_no_text_is_named(tmp_path: Path) -> None:
    (dataset := tmp_path / "sound.wav").write_bytes(b"RIFF\xb4")
    result = CliRunner().invoke(main, ["bench", "--url", NO_SERVER, "--dataset", str(dataset)])
    assert result.exit_code == 2
    assert "sound.wav: it is not text in UTF-8" in " ".join(result.stderr.split())


@pytest.mark.parametrize("option", ["--json", "--markdown"])
def test_a_file_of_figures_that_cannot_be_written_is_named_before_the_run(option: str) -> None:
    result = CliRunner().invoke(main, ["bench", "--url", NO_SERVER, option, "/proc/figures"])
    assert result.exit_code == 2
    assert f"Invalid value for {option}: /proc/figures cannot be written" in " ".join(result.stderr.split())


@pytest.mark.parametrize("words", ["1" * 5000, "1-" + "9" * 5000, "1000001"])
def test_a_prompt_has_a_bounded_number_of_words(words: str) -> None:
    result = CliRunner().invoke(main, ["bench", "--url", NO_SERVER, "--words", words])
    assert result.exit_code == 2
    assert "at most 1000000 words" in result.stderr
    assert len(result.stderr) < 1000


@pytest.mark.parametrize(("count", "settings", "most"), [("1000000000", [], 64), ("9", ["limits.max_requests=8"], 8)])
def test_a_drawing_has_no_more_pictures_than_the_pipeline_admits_requests(
    count: str, settings: list[str], most: int
) -> None:
    overrides = [argument for setting in settings for argument in ("-s", setting)]
    result = CliRunner().invoke(main, ["draw", "a cat", "-n", count, *overrides])
    assert result.exit_code == 2
    assert f"{count} is more than limits.max_requests, {most}" in result.stderr
