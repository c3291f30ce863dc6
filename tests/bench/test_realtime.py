"""The benchmark of realtime sessions is answered while stages die, talks over answers, and finds ends of turns."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import websockets
from click.testing import CliRunner

from bench import turns
from bench.realtime import barge_in, end_of_turn, kills, report
from bench.realtime.__main__ import main
from bench.realtime.server import Server
from bench.realtime.user import RATE, Answer, Spoken, Underrun
from tests.support.http_server import NO_TLS

ROOT = Path(__file__).parents[2]
QUICK = (
    *("--sessions", "2", "--seconds", "15", "--every", "6", "--variant", "cold restart"),
    *("--interruptions", "2", "--sentences", "2"),
)


@pytest.mark.voice
@pytest.mark.exhaustive
@pytest.mark.timeout(600)  # two servers load in it
def test_a_quick_run_loses_no_session_and_has_every_figure(tmp_path: Path) -> None:
    """It may find that a bound is not met on a busy machine: that a question has no answer within 90 s is one."""
    file = tmp_path / "figures.json"
    program = [sys.executable, "-m", "bench.realtime", *QUICK, "--json", str(file)]
    done = subprocess.run(program, cwd=ROOT, check=False, stderr=subprocess.PIPE, text=True)
    assert file.exists(), f"exit code {done.returncode}: {done.stderr}"
    found = json.loads(file.read_bytes())
    [run] = found["kills"]
    assert [death["stage"] for death in run["deaths"]] == list(kills.STAGES[:2])
    assert all(death["load_s"] > 0 for death in run["deaths"])
    assert (run["lost"], run["errors"]) == ([], [])
    assert {each["session"] for each in run["asked"]} == {0, 1}
    assert {each["status"] for each in run["asked"]} <= {"completed", "incomplete", "unanswered"}
    heard = [each for each in run["asked"] if each["status"] != "unanswered"]
    assert heard
    assert all(each["answer"] and each["sound_s"] > 0.5 for each in heard)
    assert all(each["met"] == (each["found"] is not None and each["found"] <= each["most"]) for each in found["bounds"])
    for each in found["barge_in"]:
        assert 0 < each["stopped_s"] <= each["done_s"]
        assert each["played_s"] > 0
    assert [each["detection"] for each in found["turns"]] == 3 * ["server_vad"] + 3 * ["semantic_vad"]
    assert all(len(each["ends_s"]) + each["wrong"] == 2 for each in found["turns"])


@asynccontextmanager
async def closing() -> AsyncIterator[Server]:
    """A server that ends each session after its first sound. Nothing answers at its /health."""

    async def session(connection: websockets.ServerConnection) -> None:
        assert "session.update" in str(await connection.recv())
        await connection.send(json.dumps({"type": "session.updated", "event_id": "e", "session": {"type": "realtime"}}))
        await connection.recv()

    async with websockets.serve(session, "127.0.0.1", 0) as sockets, httpx.AsyncClient(verify=NO_TLS) as http:
        [port] = {each.getsockname()[1] for each in sockets.sockets}
        url = f"http://127.0.0.1:{port}"
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield Server("http://127.0.0.1:1", http, client)


@pytest.mark.voice
@pytest.mark.slow
def test_sessions_that_end_early_do_not_end_a_part() -> None:
    ends, barge_ins, errors = list[end_of_turn.Heard](), list[barge_in.BargeIn](), list[str]()
    run = kills.Run("cold restart", 5.0)

    async def measure() -> None:
        async with closing() as server:
            await end_of_turn.measure(server, 1, ends)
            await barge_in.measure(server, 2, barge_ins, errors)
            run.began = time.monotonic()
            await kills.converse(server, run, 0, run.began + run.seconds)
            await kills.kill(server, run, 0.01, run.began + 0.05)

    asyncio.run(measure())
    assert all("ConnectionClosed" in each.lost or "closed the session" in each.lost for each in ends)
    assert (len(ends), barge_ins, len(errors)) == (6, [], 2)
    assert (len(run.lost), len(run.asked), run.deaths) == (1, 1, [])
    assert not any(each.is_met for each in report.turn_bounds(ends) if each.unit)
    assert [each.is_met for each in report.kill_bounds(run)] == [False, False, True]


@pytest.mark.parametrize("is_bug", [True, False])
def test_a_part_that_ends_early_is_printed_and_written_with_what_it_has(
    is_bug: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By a bug, or by SIGTERM."""

    async def fail(run: kills.Run, **_: Any) -> None:
        run.asked.append(kills.Asked(0, "Why?", status="completed"))
        if is_bug:
            raise RuntimeError("a bug")
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    monkeypatch.setattr(kills, "measure", fail)
    done = CliRunner().invoke(main, ["--only", "kills", "--json", str(tmp_path / "figures.json")])
    assert done.exit_code == 1
    assert (str(done.exception) == "a bug") == is_bug
    assert ("interrupted" in done.output) != is_bug
    assert "1 of 1" in done.output
    found = json.loads((tmp_path / "figures.json").read_bytes(), parse_constant=pytest.fail)
    assert [each["status"] for each in found["kills"][0]["asked"]] == ["completed"]


def test_an_underrun_is_told_with_the_death_that_explains_it() -> None:
    run = kills.Run("standby: 1", 300.0, began=50.0)
    run.deaths = [kills.Death("llm", 100.0, 5.0), kills.Death("vocoder", 110.0)]
    run.asked = [kills.Asked(0, "Why?", underruns=[Underrun(102.0, 0.5), Underrun(108.0, 0.3), Underrun(150.0, 0.2)])]
    assert [run.cause(each) for each in run.underruns] == [
        "within the load of llm: killed 2.0 s before, its load took 5.0 s",
        "in no load; the latest was that of llm: killed 8.0 s before, its load took 5.0 s",
        "within the load of vocoder: killed 40.0 s before, it did not serve again",
    ]
    assert [each["explained"] for each in run.figures()["asked"][0]["underruns"]] == [True, False, True]
    assert [(each.what, each.is_met) for each in report.kill_bounds(run)][2:] == [
        ("standby: 1: underruns outside of a stage's load", False),
        ("standby: 1: underruns", False),
    ]


def sound(seconds: float) -> bytes:
    return bytes(2 * round(RATE * seconds))


def test_a_player_that_waits_for_sound_underruns_when_it_has_played_everything() -> None:
    answer = Answer()
    answer.hear(10.0, sound(1.0))
    answer.hear(11.05, sound(1.0))
    assert answer.underruns == []
    answer.hear(13.0, sound(0.5))
    [underrun] = answer.underruns
    assert underrun.at == pytest.approx(12.1), "it began 0.1 s after the first sound"
    assert underrun.gap_s == pytest.approx(1.0)
    assert (answer.first_s, answer.last_s, answer.heard_s) == (10.0, 13.0, 2.5)
    assert [answer.played_s(at) for at in (13.1, 13.2, 20.0)] == pytest.approx([2.0, 2.1, 2.5])


def test_an_underrun_belongs_to_a_death_if_it_begins_before_the_stage_serves_again() -> None:
    death = kills.Death("llm", at=100.0, load_s=5.0)
    begins = (99.9, 100.1, 105.0 + kills.LATEST_S, 105.1 + kills.LATEST_S)
    assert [death.explains(Underrun(at, 1.0)) for at in begins] == [False, True, True, False]


def test_words_that_were_not_recognized_get_times_from_their_neighbours() -> None:
    timed = [(" The", 0.2), (" quick", 0.6), (" socks", 1.0), (" jumps,", 1.4), (" over.", 1.8)]
    assert barge_in.word_times("The quick fox jumps over it.", timed) == [0.2, 0.6, 1.0, 1.4, 1.8, math.inf]
    assert barge_in.word_times("Not a word of it", []) == [math.inf] * 5


STARTED = ((102.1, 9.3), (107.1, 14.3), (109.0, 16.2), (112.2, 19.3))
STOPPED = ((105.5, 12.9), (108.8, 16.0), (110.5, 17.9), (118.0, 23.0))
"""The third sentence's end arrives late, and counts."""


def test_sentences_that_are_cut_missed_or_found_too_soon_are_wrong() -> None:
    silence = np.zeros(0, np.float32)
    conversation = turns.Conversation(
        silence, [(2000.0 + 5000 * number, 5000.0 + 5000 * number) for number in range(4)]
    )
    # Each event: when it arrived, and where it is in the session's sound, in which the conversation begins at 7.5 s.
    started = [(at, SimpleNamespace(audio_start_ms=1000 * place)) for at, place in STARTED]
    stopped = [(at, SimpleNamespace(audio_end_ms=1000 * place)) for at, place in STOPPED]
    found = end_of_turn.Heard("server_vad", None, [], [], [], 0)
    end_of_turn.compare(found, Spoken(100.0, 122.0, 7.5), conversation, started, stopped)
    assert found.wrong == 2, "the second one was cut, and the last one missed"
    assert found.starts_s == pytest.approx([0.1, 0.2])
    assert found.ends_s == pytest.approx([0.5, 3.0])
    assert found.positions_s == pytest.approx([0.4, 0.5])
