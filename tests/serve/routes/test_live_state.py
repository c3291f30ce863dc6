"""The live state: one document, and a stream of its changes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import msgspec
import pytest

from omni_actors import OmniSystem
from omni_actors.serve.api.merge_patch import apply_patch, merge_patch
from omni_actors.serve.api.responses import event
from omni_actors.serve.state_feed import MAX_VIEWERS, MAX_VIEWERS_PER_ADDRESS
from omni_actors.system.live_requests import STDERR_LINES
from tests.support.http_server import NO_TLS, WATCHDOG_S, Server, Start
from tests.support.served_engines import LAST_LINES

QUESTION: dict[str, Any] = {"model": "studio", "messages": [{"role": "user", "content": "hello"}]}


RECENT, TIMES = 30, 200


class Viewer:
    """A reader of the stream, which applies each change to the state."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines, self.state, self.names = response.iter_lines(), dict[str, Any](), list[str]()

    def read(self) -> str:
        """Read the next event, and return its name."""
        fields: dict[str, str] = {}
        for line in self._lines:
            if line == "" and fields:
                break
            name, _, value = line.partition(": ")
            if name:
                fields[name] = value
        name, data = fields["event"], json.loads(fields["data"])
        if name == "state":
            self.state = data
        elif name == "change":
            self.state = apply_patch(self.state, data)
        self.names.append(name)
        return name

    def read_until(self, found: Any) -> dict[str, Any]:
        """Read until ``found(state)`` is true, and return the state. The client's timeout is the watchdog."""
        while not self.state or not found(self.state):
            assert self.read() != "end"
        return self.state


@contextmanager
def viewer(server: Server, http: httpx.Client | None = None) -> Iterator[Viewer]:
    """A viewer. http: the client; by default that of the server."""
    with (http or server.http).stream("GET", "/v1/state", params={"stream": "true"}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Viewer(response)


def test_the_document_has_stages_rings_and_the_parts_of_a_request(studio: Server) -> None:
    answer = studio.http.post(
        "/v1/chat/completions",
        json={**QUESTION, "modalities": ["text", "audio"], "audio": {"voice": "x", "format": "wav"}},
    )
    assert answer.status_code == 200, answer.text
    state = studio.http.get("/v1/state").json()
    assert list(state["stages"]) == ["ear", "mind", "mouth"]
    assert state["stages"]["mind"]["inputs"] == ["ear"]
    replica = state["stages"]["mind"]["replicas"]["0"]
    assert (replica["state"], replica["pid"]) == ("ready", studio.pid_of("mind"))
    ring = state["rings"]["mind.0>mouth.0"]
    assert ring["messages"] > 0
    assert 0 <= ring["used"] <= ring["capacity"]
    request = state["requests"][answer.json()["id"]]
    assert (request["state"], request["stages"]) == ("done", ["mind", "mouth"])
    assert 0 < request["ttft_s"] <= request["total_s"]
    assert 0 < request["ttfa_s"] <= request["total_s"]
    kinds = {(bar.get("stage"), bar["kind"]) for bar in request["bars"]}
    assert {(None, "queue"), ("mind", "step"), ("mouth", "transfer"), ("mouth", "step")} <= kinds
    assert all(0 <= bar["began"] <= bar["ended"] for bar in request["bars"])


def test_a_viewer_sees_a_request_end_and_its_patches_lead_to_the_document(studio: Server) -> None:
    with viewer(studio) as seen:
        assert seen.read() == "state"
        name = studio.http.post("/v1/chat/completions", json=QUESTION).json()["id"]
        state = seen.read_until(lambda state: state["requests"].get(name, {}).get("state") == "done")
    now = studio.http.get("/v1/state").json()
    assert {**state, "at": 0} == {**now, "at": 0}
    assert set(seen.names[1:]) == {"change"}


def test_a_viewer_sees_a_death_with_its_signal_and_the_new_worker(start: Start) -> None:
    with start() as server, viewer(server) as seen:
        seen.read()
        before = seen.state["stages"]["mind"]["replicas"]["0"]
        os.kill(before["pid"], signal.SIGKILL)
        down = seen.read_until(lambda state: "down_since" in state["stages"]["mind"]["replicas"]["0"])
        [death] = down["stages"]["mind"]["replicas"]["0"]["deaths"]
        assert (death["signal"], death["pid"], death["generation"]) == ("SIGKILL", before["pid"], 1)
        up = seen.read_until(lambda state: state["stages"]["mind"]["replicas"]["0"]["state"] == "ready")
        after = up["stages"]["mind"]["replicas"]["0"]
        assert after["generation"] == 2
        assert after["pid"] != before["pid"]
        assert "down_since" not in after


def test_a_failure_and_a_death_have_the_last_lines_of_stderr(start: Start) -> None:
    with start("-s", "limits.replays=0") as server:
        server.http.post("/v1/audio/speech", json={"model": "studio", "input": "a deadly word"})
        server.wait(lambda: server.replica("mouth")["generation"] == 2, "a new worker")
        state = server.http.get("/v1/state").json()
    [request] = state["requests"].values()
    [death] = state["stages"]["mouth"]["replicas"]["0"]["deaths"]
    last = [line.rstrip("\n") for line in LAST_LINES[-STDERR_LINES:]]
    assert request["failure"]["exit_code"] == death["exit_code"] == 3
    assert (request["failure"]["stderr"], death["stderr"]) == (last, last)


def test_the_stream_ends_with_an_event_when_the_server_drains(start: Start) -> None:
    with start("--drain-s", "60") as server, viewer(server) as seen:
        seen.read()
        server.signal(signal.SIGTERM)
        while seen.read() != "end":
            pass
        assert server.wait_end() == 0


def test_the_number_of_viewers_is_bounded_and_a_place_is_free_again(studio: Server) -> None:
    opened: list[Viewer] = []  # a viewer that is not kept closes its stream
    with ExitStack() as open_things:

        def refusal(client: httpx.Client) -> str:
            """Take all places that are left for a client, and return the message of the refusal behind them."""
            for _ in range(MAX_VIEWERS_PER_ADDRESS):
                opened.append(open_things.enter_context(viewer(studio, client)))
                opened[-1].read()
            refused = client.get("/v1/state", params={"stream": "true"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_viewers")
            message: str = refused.json()["error"]["message"]
            return message

        for number in (2, 3):
            transport = httpx.HTTPTransport(local_address=f"127.0.0.{number}")
            client = open_things.enter_context(httpx.Client(base_url=studio.url, timeout=60, transport=transport))
            who = f"{MAX_VIEWERS_PER_ADDRESS} viewers of this address" if number == 2 else f"{MAX_VIEWERS} viewers"
            assert refusal(client) == f"{who} have this stream already, which is the limit"
        assert studio.http.get("/v1/state", params={"stream": "true"}).status_code == 503
        assert studio.http.get("/v1/state").status_code == 200
    studio.wait(lambda: _is_streamed(studio), "a place for a viewer")


def _is_streamed(server: Server) -> bool:
    with server.http.stream("GET", "/v1/state", params={"stream": "true"}) as response:
        return response.status_code == 200


def test_asking_for_the_head_of_the_stream_takes_no_place(studio: Server) -> None:
    for _ in range(MAX_VIEWERS + 1):
        response = studio.http.head("/v1/state?stream=true", timeout=20)
        assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert response.content == b""
    with studio.http.stream("GET", "/v1/state?stream=true") as response:
        assert response.status_code == 200


@pytest.mark.parametrize("stream", ["true", "false"])
def test_the_live_state_needs_the_key(slow: Server, stream: str) -> None:
    with httpx.Client(base_url=slow.url, timeout=WATCHDOG_S, verify=NO_TLS) as stranger:
        assert stranger.get("/v1/state", params={"stream": stream}).status_code == 401
    with viewer(slow) as seen:
        assert seen.read() == "state"


@pytest.mark.perf
async def test_ten_states_a_second_cost_less_than_a_fiftieth_of_a_core() -> None:
    """The time is this process's CPU time, which other programs change little."""
    async with OmniSystem.open("echo") as omni:
        for _ in range(RECENT):
            await omni.generate("hello").text()
        before = msgspec.to_builtins(omni.live_state())
        began = time.process_time()
        for _ in range(TIMES):
            state = msgspec.to_builtins(omni.live_state())
            event(merge_patch(before, {**state, "in_flight": 1}), "change")
        each_s = (time.process_time() - began) / TIMES
    print(f"one live state with its patch: {1e6 * each_s:.0f} us, {100 * 10 * each_s:.2f}% of a core at 10 Hz")
    assert 10 * each_s < 0.02
