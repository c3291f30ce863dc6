"""The benchmarks of the page and of turns say which bounds are met, and exit with 1 when one is not."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bench import page, turns

MET = {
    "first_paint_ms": [100.0, 300.0],
    "page_bytes": 300_000,
    "server_share_of_viewers": {1: 0.002, 4: 0.02},
    "browser_shares": {"updates": 0.02, "main_thread": 0.11, "all": 0.16},
}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def missed(output: str) -> list[str]:
    """Return the bounds that a table calls missed."""
    return re.findall(r"│ (.*?) +│[^│]*│[^│]*│ missed", output)


@pytest.mark.parametrize(
    ("worse", "what"),
    [
        ({}, []),
        ({"first_paint_ms": [100.0, 301.0, 99.0]}, ["first paint, most"]),
        ({"page_bytes": 300_100}, ["files of the page"]),
        ({"server_share_of_viewers": {1: 0.021, 4: 0.01}}, ["CPU time: server, viewers: 1"]),
        ({"browser_shares": {"updates": 0.021}}, ["CPU time: scripts, styles and layouts of the page"]),
    ],
)
def test_the_page_has_bounds(worse: dict[str, Any], what: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "measure", lambda loads, seconds: {**MET, **worse})
    done = CliRunner().invoke(page.main)
    assert (missed(done.output), done.exit_code) == (what, bool(what)), done.output


def test_pictures_of_the_page_have_no_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "screenshots", lambda folder: None)
    done = CliRunner().invoke(page.main, ["--screenshots", "."])
    assert (missed(done.output), done.exit_code) == ([], 0), done.output


@pytest.mark.parametrize(
    ("worse", "what"),
    [
        ({}, []),
        ({"wrong": 1}, ["sentences cut, missed or joined"]),
        ({"start_delays_ms": [251.0]}, ["start found, p95"]),
        ({"end_delays_ms": [601.0]}, ["end found, p95"]),
        ({"end_delays_ms": []}, ["end found, p95"]),
        ({"cpu_s": 0.021}, ["CPU time"]),
    ],
)
def test_turns_have_bounds(worse: dict[str, Any], what: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the sounds of each kind of detection is worse."""
    good = turns.Found([250.0], [400.0], 0, 0.02)
    heard = 0

    def listen(*_: Any) -> turns.Found:
        nonlocal heard
        heard += 1
        return good._replace(**worse) if heard % 9 == 2 else good

    silence = turns.Conversation(np.zeros(turns.RATE, np.float32), [])
    monkeypatch.setattr(turns, "say", lambda text: silence.sound)
    monkeypatch.setattr(turns, "converse", lambda sentences, noise_db: silence)
    monkeypatch.setattr("omni_actors.turns.open_detector", lambda settings: None)
    monkeypatch.setattr(turns, "listen", listen)
    done = CliRunner().invoke(turns.main)
    assert heard == 18
    found = [f"{kind}: {each}" for kind in turns.SETTINGS for each in what]
    assert (missed(done.output), done.exit_code) == (found, bool(found)), done.output
