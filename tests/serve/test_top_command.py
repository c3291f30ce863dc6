"""``omni-actors top``: one screen in a pipe, and the live screen on a pty, while a real stage dies."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pexpect
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from omni_actors.cli import main
from omni_actors.cli.top.rates import Rates
from omni_actors.cli.top.screen import Space, screen
from omni_actors.supervisor.nodes import LinkState
from omni_actors.system.live_requests import Bar, LiveRequest, RequestFailure
from omni_actors.system.live_state import LiveNode, LiveReplica, LiveRing, LiveStage, LiveState
from tests.support.http_server import WATCHDOG_S, Server, Start, until
from tests.support.readme import ROOT

GAP = r"(?:\x1b\[[0-9;]*m| )+"
"""What is between two cells of a row on a terminal: spaces and styles."""
TERMINAL_ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}} | {
    "TERM": "xterm",
    "NO_COLOR": "1",
}
"""The environment of a command on a pty. COLUMNS and LINES would override the pty's size; the processes of pytest-xdist
can have them, because pytest imports readline, which sets them to 80 and 24."""


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["top", *arguments], env={"COLUMNS": "200"})


def test_one_screen_has_stages_rings_and_requests(studio: Server) -> None:
    body = {"model": "studio", "messages": [{"role": "user", "content": "hello"}]}
    answer = studio.http.post("/v1/chat/completions", json=body).json()
    result = invoke("--url", studio.url, "--once", "--interval", "0.1")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"studio at {studio.url}  ready   requests 0/64, 0 waiting, 0.0 ended/s")
    assert re.search(rf"mind\.0 +echo +ready +{studio.pid_of('mind')} ", result.stdout)
    assert re.search(r"mind\.0 → mouth\.0 +·{10} +0 bytes of .* +0 bytes +0\.0", result.stdout)
    assert re.search(rf"{answer['id']} +done +\d+\.\d\d s +\d+\.\d\d s +– .*█", result.stdout)


def test_a_reader_that_is_gone_is_no_traceback(studio: Server) -> None:
    command = [sys.executable, "-m", "omni_actors", "top", "--url", studio.url, "--once", "--interval", "0.1"]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.PIPE, cwd=ROOT, timeout=WATCHDOG_S, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_a_pipeline_is_chosen_by_its_name(studio: Server) -> None:
    chosen = invoke("--url", studio.url, "--once", "--interval", "0.1", "--pipeline", "studio")
    assert (chosen.exit_code, chosen.stdout[:7]) == (0, "studio ")
    other = invoke("--url", studio.url, "--once", "--pipeline", "other")
    assert other.exit_code == 1
    assert "other" in other.stderr


def test_a_key_is_needed_where_the_server_has_one(slow: Server) -> None:
    refused = invoke("--url", slow.url, "--once")
    assert refused.exit_code == 1
    assert "status 401" in refused.stderr
    assert invoke("--url", slow.url, "--once", "--interval", "0.1", "--api-key", "sesame").exit_code == 0


def test_a_server_that_is_not_there_and_a_pipe_are_one_sentence() -> None:
    result = invoke("--url", "http://127.0.0.1:1", "--once")
    assert result.exit_code == 1
    assert "the connection failed" in result.stderr
    result = invoke("--url", "http://127.0.0.1:1")
    assert result.exit_code == 2
    assert "--once" in result.stderr


def test_a_narrow_terminal_shows_whole_cells_of_what_matters_most(studio: Server) -> None:
    body = {"model": "studio", "messages": [{"role": "user", "content": "hello"}]}
    answer = studio.http.post("/v1/chat/completions", json=body).json()
    arguments = ["top", "--url", studio.url, "--once", "--interval", "0.1"]
    result = CliRunner().invoke(main, arguments, env={"COLUMNS": "80"})
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert re.search(rf"mind\.0 +ready +{studio.pid_of('mind')} ", result.stdout)
    assert re.search(r"mind\.0 → mouth\.0 +·{10} .* 0 bytes +0\.0", result.stdout)
    [row] = [line for line in lines if line.startswith(answer["id"][:17])]
    rings = [line for line in lines if " → " in line]
    assert rings
    assert not [line for line in (row, *rings) if "…" in line], "only notes, and reasons of failures, are cut"
    bar = row.rpartition("–")[2]  # behind TTFA: the answer has no sound
    assert len(bar) >= 12, "the bar has what is left"
    assert "█" in bar
    narrow = CliRunner().invoke(main, arguments, env={"COLUMNS": "40"}).stdout
    assert max(map(len, narrow.splitlines())) <= 40, narrow
    assert "0.0 ended/s" in " ".join(narrow.split()), "the first line goes on in a second one"


def test_the_reason_of_a_failure_takes_no_space_from_other_columns() -> None:
    failure = RequestFailure(type="StageCrashed", message="the worker of a stage died " * 9)
    request = LiveRequest(
        name="chatcmpl-0", state="failed", submitted=0.0, stages=["a"], bars=[], total_s=1.0, failure=failure
    )
    shown = msgspec.structs.replace(state(0, 0), requests={"chatcmpl-0": request})
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(screen(shown, Rates(), now=2.0, url="http://x", lost=None, space=Space(80, None)))
    assert re.search(r"chatcmpl-0 +failed +1\.00 s .*the worker", console.export_text())


def test_a_request_has_its_underruns() -> None:
    request = LiveRequest(name="speech-0", state="done", submitted=0.0, stages=["a"], bars=[], total_s=1.0)
    requests = {"speech-0": msgspec.structs.replace(request, underruns=3), "speech-1": request}
    text = shown(msgspec.structs.replace(state(0, 0), requests=requests), Rates(), 200)
    assert re.search(r"TTFA  underruns  life", text)
    assert "underruns" not in shown(msgspec.structs.replace(state(0, 0), requests={"speech-1": request}), Rates(), 200)
    assert len(re.findall(r"done +1\.00 s +– +– +3 ", text)) == 1
    assert len(re.findall(r"done +1\.00 s +– +– +$", text, re.MULTILINE)) == 1, "no number stands for none"


@pytest.mark.parametrize(("used", "capacity"), [(0, 0), (7, 0), (10**7, 1024), (-5, 1024)])
def test_a_ring_of_impossible_size_takes_the_space_of_one_ring(used: int, capacity: int) -> None:
    live = state(0, 0)
    rings = {name: msgspec.structs.replace(ring, used=used, capacity=capacity) for name, ring in live.rings.items()}
    assert rings
    text = shown(msgspec.structs.replace(live, rings=rings), Rates(), 200)
    assert all(len(line) <= 200 for line in text.splitlines())
    assert len(re.findall("[█·]", text)) == 10 * len(rings)


@pytest.mark.parametrize("total", [1.0, 5e-324])
@pytest.mark.parametrize(("began", "ended", "parts"), [(-1e9, 1e308, 32), (1e308, -1e9, 1), (-1e9, -1e9, 1)])
def test_a_life_of_impossible_times_takes_the_space_of_one_life(
    total: float, began: float, ended: float, parts: int
) -> None:
    bar = Bar(kind="step", began=began, ended=ended)
    request = LiveRequest(name="req-1", state="done", submitted=0.0, stages=["a"], bars=[bar], total_s=total)
    text = shown(msgspec.structs.replace(state(0, 0), requests={"req-1": request}), Rates(), 200)
    assert text.count("█") == parts


def clustered(at: float, crossed: int) -> LiveState:
    """A stage on two nodes, of which one was lost, and the link of one ring, over which records have crossed."""
    replica = LiveReplica(
        state="ready",
        standby=False,
        note="ready",
        generation=1,
        restarts=0,
        requests=0,
        node="ip-10-0-3-27.examples",
    )
    stage = LiveStage(engine="echo", wanted=1, accepts=[], inputs=[], step_timeout_s=1.0, replicas={"0": replica})
    link = LinkState(
        from_node="here", to_node="far", messages=crossed, payload_bytes=crossed * 1000, waiting_bytes=2000
    )
    nodes = {
        "here": LiveNode(state="alive", since=90.0, parent=True),
        "far": LiveNode(state="lost", since=95.0, why="it asked for no renewal of its lease for 10 s"),
    }
    ring = LiveRing(producer="a.0", consumer="b.0", capacity=100, used=0, messages=0, payload_bytes=0)
    links, rings = {"a.0>b.0": link}, {"a.0>b.0": ring}
    return msgspec.structs.replace(state(0, 0), at=at, stages={"a": stage}, links=links, nodes=nodes, rings=rings)


def shown(live: LiveState, rates: Rates, columns: int, lines: int | None = None) -> str:
    console = Console(width=columns, record=True, file=io.StringIO())
    console.print(screen(live, rates, now=100.0, url="http://x", lost=None, space=Space(columns, lines)))
    return console.export_text()


def test_nodes_and_the_rates_of_links_are_shown() -> None:
    rates = Rates()
    for second in range(6):
        rates.update(clustered(100.0, 10 * second), float(second))
    text = shown(clustered(100.0, 50), rates, 120)
    assert re.search(r"a\.0 +ip-10-0-3-27\.exampl… +echo +ready", text)
    assert re.search(r"here +alive +10 s +parent", text)
    assert re.search(r"far +lost +5 s +it asked for no renewal of its lease for 10 s", text)
    assert re.search(r"a\.0 → b\.0 +here → far +2\.0 kB +10\.0 kB +10\.0", text)
    assert text.count("a.0 → b.0") == 1, "a ring between two nodes is shown once"
    narrow = shown(clustered(100.0, 50), rates, 60, lines=24)
    assert max(map(len, narrow.splitlines())) <= 60
    assert len(narrow.splitlines()) <= 24
    assert re.search(r"a\.0 → b\.0 .* 10\.0 kB", narrow)


def test_the_rate_of_a_link_is_a_mean_over_two_seconds() -> None:
    """Its counters change twice a second."""
    rates = Rates()
    for tick in range(40):
        rates.update(clustered(100.0, 10 * (tick // 5)), tick / 10)
        if tick >= 20:
            assert 15 <= rates.link_messages_s["a.0>b.0"] <= 25


@pytest.fixture
def terminal() -> Iterator[list[pexpect.spawn[str]]]:
    started: list[pexpect.spawn[str]] = []
    yield started
    for child in started:
        child.close(force=True)


@pytest.mark.slow
def test_the_live_screen_shows_a_death_and_the_loss_of_the_server(
    start: Start, terminal: list[pexpect.spawn[str]]
) -> None:
    with start() as server:
        child = pexpect.spawn(
            sys.executable,
            ["-m", "omni_actors", "top", "--url", server.url, "--interval", "0.1"],
            cwd=str(ROOT),
            env=TERMINAL_ENVIRONMENT,
            timeout=WATCHDOG_S,
            encoding="utf-8",
            dimensions=(40, 200),
        )
        terminal.append(child)
        pid = server.pid_of("mind")
        child.expect(GAP.join(["mind\\.0", "echo", "ready", str(pid)]))
        os.kill(pid, signal.SIGKILL)
        child.expect(GAP.join(["mind\\.0", "echo", "ready", "\\d+", "\\d+", "1", ".*last death: [^\n]*SIGKILL"]))
        until(lambda: server.status() == "ready", "the stage to be ready again")
        assert server.ends_by(signal.SIGTERM)[0] == 0
    child.expect("connecting again: ")
    child.send("q")
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0
    assert "\x1b[?1049l" in child.before, "the screen of before is back"


def test_a_terminal_without_a_cursor_is_one_sentence(terminal: list[pexpect.spawn[str]]) -> None:
    """Nothing can be drawn there, so the screen would stay empty."""
    child = pexpect.spawn(
        sys.executable,
        ["-m", "omni_actors", "top", "--url", "http://127.0.0.1:1"],
        cwd=str(ROOT),
        env={**TERMINAL_ENVIRONMENT, "TERM": "dumb"},
        timeout=WATCHDOG_S,
        encoding="utf-8",
    )
    terminal.append(child)
    child.expect(r"TERM=dumb.*--once")
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 2


def test_a_terminal_that_goes_away_ends_the_command(studio: Server) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "omni_actors", "top", "--url", studio.url, "--interval", "0.1"]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=TERMINAL_ENVIRONMENT, cwd=ROOT
    )
    os.close(theirs)
    drawn = b""
    while b"mind.0" not in drawn:
        drawn += os.read(ours, 4096)
    os.close(ours)
    _, err = process.communicate(timeout=WATCHDOG_S)
    assert (process.returncode, err.decode()) == (0, "")


def state(payload: int, messages: int) -> LiveState:
    ring = LiveRing(producer="a.0", consumer="b.0", capacity=100, used=0, messages=messages, payload_bytes=payload)
    return LiveState(
        at=0.0,
        pipeline="p",
        ready=True,
        errored=False,
        in_flight=0,
        waiting=0,
        max_requests=1,
        stages={},
        rings={"a.0>b.0": ring},
        requests={},
    )


def test_rates_are_differences_and_a_counter_that_begins_again_counts_from_0() -> None:
    rates = Rates()
    rates.update(state(1000, 10), at=1.0)
    assert (rates.bytes_s, rates.requests_s) == ({}, None)
    rates.update(state(3000, 14), at=3.0)
    assert (rates.bytes_s, rates.messages_s) == ({"a.0>b.0": 1000.0}, {"a.0>b.0": 2.0})
    rates.update(state(500, 1), at=4.0)
    assert (rates.bytes_s, rates.messages_s) == ({"a.0>b.0": 500.0}, {"a.0>b.0": 1.0})
    rates.update(state(500, 1), at=5.0)
    assert rates.bytes_s == {"a.0>b.0": 0.0}
