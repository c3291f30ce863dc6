"""What a server process logs about failures and recoveries, as plain lines and as JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError

from omni_actors import log_events
from tests.support.frozen import freeze
from tests.support.http_server import WATCHDOG_S, Api, Start, process_with_a_bug, until

Command = Callable[..., "subprocess.Popen[bytes]"]

MIND = """\
name: studio
stages:
  mind: {engine: echo, accepts: [messages], emits: text, options: {fan_out: 100, step_s: 0.01}}
"""
BROKEN = """\
name: broken
stages: {one: {engine: "tests.support.served_engines:broken", accepts: [script], emits: text}}
"""
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
RECOVERY = ["worker_died", "worker_restarted", "worker_recovered", "requests_replayed"]


class JSONServer(Api):
    """A server that logs JSON. stderr: the file that it logs to."""

    def __init__(self, process: subprocess.Popen[bytes], stderr: Path) -> None:
        self.process, self._stderr = process, stderr
        super().__init__(self.event("server_listening")["url"])
        self.event("server_ready")

    def events(self) -> list[dict[str, Any]]:
        """Return every complete line as an object."""
        *lines, _ = self._stderr.read_text("ascii").split("\n")
        return [json.loads(line) for line in lines]

    def event(self, name: str) -> dict[str, Any]:
        """Wait for the first event of this name."""
        until(lambda: any(event["event"] == name for event in self.events()), name)
        return next(event for event in self.events() if event["event"] == name)


@pytest.fixture
def start_json(command: Command, tmp_path: Path) -> Callable[..., Any]:
    @contextmanager
    def open_server(*arguments: str) -> Iterator[JSONServer]:
        pipeline, stdout, stderr = tmp_path / "pipeline.yaml", tmp_path / "stdout", tmp_path / "stderr"
        pipeline.write_text(MIND)
        arguments = (str(pipeline), "--port", "0", "--log-format", "json", *arguments)
        with stdout.open("wb") as out, stderr.open("wb") as err, command(*arguments, stdout=out, stderr=err) as process:
            try:
                server = JSONServer(process, stderr)
                with server.http:
                    yield server
            finally:
                process.send_signal(signal.SIGINT)
        assert stdout.read_text() == "", "all output is in the log"

    return open_server


def kill_with_a_request(server: Api) -> int:
    """Kill a worker that holds a request, and read the answer to its end. Returns the worker's pid."""
    pid = server.pid_of("mind")
    freeze(pid)  # so that it holds the request for as long as this takes
    with server.openai() as client, ThreadPoolExecutor(1) as thread:
        answer = thread.submit(
            client.chat.completions.create, model="studio", messages=[{"role": "user", "content": "hi"}]
        )
        server.wait_metric("omni_requests_in_flight", 1)
        os.kill(pid, signal.SIGKILL)
        assert answer.result(WATCHDOG_S).choices[0].message.content == "hi" * 100, "the answer is complete"
    return pid


@pytest.mark.slow
def test_a_death_and_its_recovery_in_plain_words(start: Start) -> None:
    with start(config=MIND) as server:
        pid = kill_with_a_request(server)
        until(lambda: server.stderr.count("\n") == 4, "four lines")
        lines = [
            f"WARNING stage 'mind' (replica 0, generation 1) died: pid {pid} was killed by SIGKILL; it held 1 request",
            r"INFO stage 'mind' (replica 0, generation 2) was restarted as pid \d+, after it was down for \d+.\d\d s",
            r"INFO stage 'mind' (replica 0, generation 2) is ready again as pid \d+; it was down for \d+.\d\d s",
            r"INFO 1 request was replayed \d+.\d\d s after the death of stage 'mind' (replica 0, generation 1)",
        ]
        patterns = [f"{TIME} {line.replace('(', '[(]').replace(')', '[)]')}" for line in lines]
        assert re.fullmatch("".join(f"{pattern}\n" for pattern in patterns), server.stderr), server.stderr
        assert server.ends_by(signal.SIGTERM)[0] == 0
        assert server.stderr.count("\n") == 4, "a worker that is stopped has not died"


def test_a_death_and_its_recovery_in_json(start_json: Callable[..., Any]) -> None:
    with start_json() as server:
        pid = kill_with_a_request(server)
        server.event("requests_replayed")
        events = server.events()[2:]
        new_pid = server.pid_of("mind")
    assert [event["event"] for event in events] == RECOVERY
    assert [event["level"] for event in events] == ["warning", "info", "info", "info"]
    assert all(datetime.fromisoformat(event["timestamp"]).utcoffset() == timedelta(0) for event in events)
    died, restarted, recovered, replayed = events
    end = {"stage": "mind", "replica": 0, "generation": 1, "pid": pid, "signal": "SIGKILL", "exit_code": None}
    assert died.items() >= {**end, "requests": 1, "reason": None}.items()
    assert restarted.items() >= {"stage": "mind", "replica": 0, "generation": 2, "pid": new_pid}.items()
    assert recovered.items() >= {"stage": "mind", "replica": 0, "generation": 2, "pid": new_pid}.items()
    assert replayed.items() >= {**end, "requests": 1}.items()
    assert 0 < restarted["down_s"] <= recovered["down_s"] <= replayed["replayed_after_s"] < WATCHDOG_S


def test_what_happens_to_a_replica_later_is_not_logged_under_the_request_that_added_it(
    start_json: Callable[..., Any],
) -> None:
    with start_json("--enable-admin", "--api-key", "sesame") as server:
        server.http.headers["authorization"] = "Bearer sesame"
        operator = {"x-request-id": "operator"}
        scaled = server.http.post("/scale", params={"stage": "mind", "replicas": 2}, headers=operator)
        assert (scaled.status_code, scaled.headers["x-request-id"]) == (200, "operator")
        added = server.http.get("/health").json()["stages"]["mind"][1]
        os.kill(added["pid"], signal.SIGKILL)
        server.event("worker_recovered")
        events = server.events()[2:]
    assert [(event["event"], event.get("request_id")) for event in events] == [(each, None) for each in RECOVERY[:3]]


def test_the_documentation_has_every_event() -> None:
    pending, page = [log_events.LogEvent], (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    while pending:
        kind = pending.pop()
        if below := kind.__subclasses__():
            pending += below
        else:
            assert f"`{kind.__struct_config__.tag}`" in page


@pytest.mark.slow
def test_a_replica_that_was_given_up_and_serves_again_in_json(start_json: Callable[..., Any]) -> None:
    with start_json("-s", "stages.mind.restart={intensity: 0, retry_s: 0.5}") as server:
        with pytest.raises(APIStatusError, match="is not available"):
            kill_with_a_request(server)
        given_up = server.event("replica_given_up")
        recovered = server.event("worker_recovered")
        names = [event["event"] for event in server.events()[2:]]
    assert names == ["worker_died", "replica_given_up", "worker_restarted", "worker_recovered"]
    assert given_up.items() >= {"level": "error", "stage": "mind", "generation": 1, "signal": "SIGKILL"}.items()
    assert 0 < given_up["retry_in_s"] <= 0.5
    assert given_up["requests"] == 1
    assert recovered["down_s"] >= 0.5


def test_a_stage_that_cannot_load_is_one_json_object(command: Command, tmp_path: Path) -> None:
    pipeline = tmp_path / "broken.yaml"
    pipeline.write_text(BROKEN)
    arguments = (str(pipeline), "--port", "0", "--log-format", "json")
    with command(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=WATCHDOG_S)
    _, failed = map(json.loads, err.splitlines())
    assert (process.returncode, out) == (1, b"")
    assert failed.items() >= {"level": "critical", "event": "server_failed", "error": "StageFailed", "code": 1}.items()
    assert failed.items() >= {"stage": "one", "replica": 0, "generation": 1, "exit_code": 1}.items()
    assert "the weights of this model are not there" in failed["reason"]


def test_a_bad_configuration_is_one_json_object(command: Command) -> None:
    arguments = ("nowhere", "--log-format", "json")
    with command(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=WATCHDOG_S)
    [failed] = map(json.loads, err.splitlines())
    assert (process.returncode, out) == (2, b"")
    assert failed.items() >= {"event": "server_failed", "error": "ConfigError", "code": 2}.items()
    assert "stage" not in failed


def test_a_traceback_is_inside_its_json_object() -> None:
    with process_with_a_bug("--log-format", "json") as process:
        _, err = process.communicate(timeout=WATCHDOG_S)
    objects = [json.loads(line) for line in err.splitlines()]
    assert [each["event"] for each in objects] == ["server_listening", "log"]
    assert objects[-1]["level"] == "critical"
    assert "ZeroDivisionError: a bug" in objects[-1]["traceback"]
