"""The life cycle of a server process: start, health, drain, end, exit codes. Nothing is left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from click.testing import CliRunner

from omni_actors.serve.command import serve_command
from omni_actors.serve.server import DUPLICATE_SIGNAL_S, serve
from omni_actors.serve.settings import ServerSettings
from tests.support.http_server import WATCHDOG_S

Start = Callable[..., AbstractContextManager[Any]]
Command = Callable[..., "subprocess.Popen[bytes]"]

MIND = """\
name: studio
stages:
  mind: {engine: echo, accepts: [messages], emits: text}
"""
MOUTH = """\
name: studio
stages:
  mouth: {engine: "tests.support.served_engines:Speaker", accepts: [script], emits: audio}
"""
ENDLESS = ("-s", "stages.mind.options.fan_out=1000000", "-s", "stages.mind.options.step_s=0.01")
HELLO: Any = [{"role": "user", "content": "hello"}]


def test_health_models_and_metrics(studio: Any) -> None:
    health = studio.http.get("/health")
    assert health.status_code == 200
    body = health.json()
    assert (body["status"], body["model"], body["error"]) == ("ready", "studio", None)
    assert {stage: [replica["state"] for replica in replicas] for stage, replicas in body["stages"].items()} == {
        "ear": ["ready"],
        "mind": ["ready"],
        "mouth": ["ready"],
    }
    [model] = studio.http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("studio", "model")
    assert studio.http.get("/v1/models/studio").json() == model
    before = studio.metric('omni_http_answers_total{path="/v1/models",status="200"}')
    studio.http.get("/v1/models")
    assert studio.metric('omni_http_answers_total{path="/v1/models",status="200"}') == before + 1
    assert studio.metric('omni_stage_ready{replica="0",stage="mind"}') == 1


def test_it_listens_while_it_loads_and_reports_it(start: Start) -> None:
    slow = ("-s", "stages.mind.options.load_s=3600", "-s", "name=studio/mind")
    with start(*slow, config=MIND, ready=False) as server:
        health = server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        answer = server.http.post("/v1/chat/completions", json={"model": "studio/mind", "messages": HELLO})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
        assert int(answer.headers["retry-after"]) >= 1
        assert server.http.get("/v1/models").status_code == 200
        assert server.http.get("/v1/models/studio/mind").json()["id"] == "studio/mind"
        server.wait(lambda: server.replica("mind")["pid"] is not None, "its worker to be started")
        assert server.ends_by(signal.SIGINT) == (0, "")


def test_an_idle_server_ends_at_once(start: Start) -> None:
    """Also if a client keeps its idle connection open."""
    with start("--drain-s", "600", config=MIND) as server:
        assert server.http.get("/health").status_code == 200
        assert server.ends_by(signal.SIGTERM) == (0, "")


def test_requests_in_progress_may_end_and_no_new_one_begins(start: Start) -> None:
    """A signal that arrives twice at once counts once: ``timeout`` signals the process and its group."""
    # 60 pieces, 10 ms each.
    options = ("-s", "stages.mind.options.fan_out=60", "-s", "stages.mind.options.step_s=0.01", "--drain-s", "60")
    with start(*options, config=MIND) as server, server.openai() as client:
        stream = client.chat.completions.create(model="studio", messages=HELLO, stream=True)
        pieces = iter(stream)
        next(pieces)
        process = psutil.Process(server.process.pid)
        process.suspend()  # so that it finds them all at once, however long it takes to send them
        server.wait(lambda: process.status() == psutil.STATUS_STOPPED, "it to be suspended")
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            server.signal(number)
        process.resume()
        server.wait_refusing()  # the signal has had its effect
        rest = list(pieces)
        assert rest[-1].choices[0].finish_reason == "stop"
        assert len(rest) == 61
        with pytest.raises(openai.APIConnectionError):
            client.models.list()
        assert (server.wait_end(), server.stderr) == (0, "")


def test_a_stream_that_does_not_end_in_time_ends_with_an_error(start: Start) -> None:
    with start(*ENDLESS, "--drain-s", "0.2", config=MIND) as server, server.openai() as client:
        stream = client.chat.completions.create(model="studio", messages=HELLO, stream=True)
        next(iter(stream))
        server.signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="shutting down") as caught:
            for _ in stream:
                pass
        assert caught.value.code == "aborted"
        assert (server.wait_end(), server.stderr) == (0, "")


def test_a_whole_answer_that_does_not_end_in_time_is_an_error(start: Start) -> None:
    body = json.dumps({"model": "studio", "messages": HELLO}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with start(*ENDLESS, "--drain-s", "0.2", config=MIND) as server:
        with socket.create_connection(("127.0.0.1", server.port), 60) as client:
            client.sendall(head + body)
            server.wait_metric("omni_requests_in_flight", 1)
            server.signal(signal.SIGINT)
            with contextlib.closing(http.client.HTTPResponse(client)) as answer:
                answer.begin()
                assert (answer.status, json.loads(answer.read())["error"]["code"]) == (503, "aborted")
        assert (server.wait_end(), server.stderr) == (0, "")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        pytest.param("/v1/audio/transcriptions", marks=pytest.mark.slow),
        pytest.param("/tokenize", marks=pytest.mark.slow),
    ],
)
def test_an_upload_that_does_not_end_in_time_is_refused(start: Start, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
    with start("--drain-s", "0.2", config=MIND) as server, socket.socket() as client:
        client.settimeout(WATCHDOG_S)
        client.connect(("127.0.0.1", server.port))
        client.sendall(head.encode())
        server.wait(lambda: "omni_http_arriving 1.0" in server.http.get("/metrics").text, "the head")
        server.signal(signal.SIGTERM)
        answer = b"".join(iter(lambda: client.recv(1 << 16), b"")).decode()
        assert answer.startswith("HTTP/1.1 503 ")
        assert "x-request-id: " in answer
        assert '"message":"the server is shutting down"' in answer
        assert server.wait_end() == 0


def test_a_client_that_does_not_read_delays_nothing(start: Start) -> None:
    endless = ("-s", "stages.mind.options.fan_out=1000000", "-s", "limits.output_bytes=100000")
    with start(*endless, "--drain-s", "0.2", config=MIND) as server, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.port))
        body = b'{"model":"studio","stream":true,"messages":[{"role":"user","content":"hello"}]}'
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        deaf.sendall(head % len(body) + body)
        # What it does not read fills its connection, then its share of memory, and then its request is over.
        server.wait_metric('omni_requests_total{outcome="SlowConsumer"}', 1)
        assert server.ends_by(signal.SIGINT) == (0, "")


def test_a_second_signal_ends_it_at_once(start: Start) -> None:
    with start(*ENDLESS, "--drain-s", "600", config=MIND) as server, server.openai() as client:
        stream = client.chat.completions.create(model="studio", messages=HELLO, stream=True)
        next(iter(stream))
        server.signal(signal.SIGINT)
        server.wait_refusing()  # the first signal has had its effect
        time.sleep(DUPLICATE_SIGNAL_S)  # not before this: a signal that comes sooner counts as the same one
        assert server.ends_by(signal.SIGTERM)[0] == -signal.SIGTERM
        stream.close()


# what cannot start


def run(command: Command, *arguments: str) -> tuple[int, str, str]:
    with command(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out.decode(), err.decode()


def test_the_exit_code_of_a_bad_configuration(command: Command) -> None:
    code, out, err = run(command, "nowhere")
    assert (code, out) == (2, "")
    assert err.startswith("Error: ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere"),
        (["echo", "-s", "stages.fist.replicas=2"], "did you mean 'first'"),
        (["echo", "-s", "stages.first.threads=-1"], "stages.first.threads"),
        (["echo", "-s", "nonsense"], "path.to.value=VALUE"),
        (["echo", "--port", "x"], "--port"),
        (["echo", "--drain-s", "-1"], "--drain-s"),
        (["echo", "--allow-media-domain", "127.0.0.1"], "'127.0.0.1' is not a domain"),
        (["echo", "--allow-media-domain", "http://example.org"], "is not a domain"),
        (["echo", "--allow-media-dir", "/nowhere/at/all"], "'/nowhere/at/all' is not a folder"),
        ([], "PIPELINE"),
    ],
)
def test_a_bad_configuration(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(serve_command, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert isinstance(result.exception, SystemExit), "a sentence, not a traceback"


@pytest.mark.parametrize("key", ["", " "])
@pytest.mark.parametrize("source", ["option", "variable"])
def test_an_empty_key_does_not_open_the_server(key: str, source: str) -> None:
    arguments, variables = (["--api-key", key], {}) if source == "option" else ([], {"OMNI_ACTORS_API_KEY": key})
    result = CliRunner().invoke(serve_command, ["echo", "--port", "0", *arguments], env=variables)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "key is empty" in result.stderr
    assert "OMNI_ACTORS_API_KEY" in result.stderr


async def test_an_empty_key_in_a_program_is_an_error_too() -> None:
    with pytest.raises(ValueError, match="API key is empty"):
        await serve("echo", ServerSettings(api_key=""))


def test_a_key_from_the_environment_equals_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_ACTORS_API_KEY", "sesame")
    of_the_environment, given = (
        serve_command.make_context("serve", ["echo", *more]).params for more in ([], ["--api-key", "sesame"])
    )
    assert of_the_environment == given
    assert "sesame" in given.values()


def test_the_command_and_the_function_have_the_same_defaults() -> None:
    arguments = serve_command.make_context("serve", ["echo"]).params
    names = [field.name for field in fields(ServerSettings)]
    assert ServerSettings(**{name: arguments[name] for name in names}) == ServerSettings()


def test_an_address_in_use(command: Command, taken_port: int) -> None:
    code, out, err = run(command, "echo", "--port", str(taken_port))
    assert (code, out, err) == (1, "", f"Error: cannot listen on 127.0.0.1:{taken_port}: Address already in use\n")


def test_an_invalid_address() -> None:
    result = CliRunner().invoke(serve_command, ["echo", "--port", "0", "--host", "not a host"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: cannot listen on not a host:0: ")


@pytest.mark.parametrize("verbose", [False, True])
def test_a_stage_that_cannot_load_ends_the_server_with_its_error(
    command: Command, tmp_path: Path, verbose: bool
) -> None:
    """In one sentence; --verbose adds the worker's traceback."""
    pipeline = tmp_path / "broken.yaml"
    pipeline.write_text(
        'name: broken\nstages: {one: {engine: "tests.support.served_engines:broken", accepts: [script], emits: text}}\n'
    )
    code, out, err = run(command, str(pipeline), "--port", "0", *["--verbose"] * verbose)
    assert code == 1
    assert out.startswith("listening on ")
    assert err.startswith("Error: stage 'one'")
    assert "the weights of this model are not there" in err.splitlines()[0]
    assert ("Traceback (most recent call last)" in err) == verbose
    assert ("--verbose shows" in err) != verbose


def test_one_stage_that_dies_too_often_leaves_the_others_serving(start: Start) -> None:
    """/health shows the reason, and not the worker's stderr."""
    with start("-s", "stages.mouth.restart={intensity: 0}") as server, server.openai() as client:
        answer = server.http.post("/v1/audio/speech", json={"model": "studio", "input": "a deadly word"})
        assert answer.status_code == 503
        server.wait(lambda: server.status() == "failed", "the stage to be given up")
        health = server.http.get("/health")
        assert health.status_code == 503
        assert "exited with code 3" in health.json()["error"]
        assert "words of the worker" not in health.text
        assert server.metric('omni_stage_ready{replica="0",stage="mouth"}') == 0
        with pytest.raises(openai.InternalServerError, match="mouth") as caught:
            client.audio.speech.create(model="studio", voice="any", input="hello")
        assert caught.value.status_code == 503
        retry_in_s = server.http.get("/health").json()["stages"]["mouth"][0]["retry_in_s"]
        assert retry_in_s < int(caught.value.response.headers["retry-after"]) < retry_in_s + 60, (
            "when it is tried again"
        )
        answer = client.chat.completions.create(model="studio", messages=HELLO)
        assert answer.choices[0].message.content == "hello" * 3


@pytest.mark.slow
def test_a_stage_that_is_not_tried_again_promises_no_time(start: Start) -> None:
    with start("-s", "stages.mouth.restart={intensity: 0, retry_s: 0}", config=MOUTH) as server:
        answer = server.http.post("/v1/audio/speech", json={"model": "studio", "input": "a deadly word"})
        assert (answer.status_code, "retry-after" in answer.headers) == (503, False)


def test_a_stage_that_was_given_up_serves_again_after_its_retry(start: Start) -> None:
    with start("-s", "stages.mouth.restart={intensity: 0, retry_s: 0.5}", config=MOUTH) as server:
        speech = {"model": "studio", "input": "a deadly word"}
        assert server.http.post("/v1/audio/speech", json=speech).status_code == 503
        server.wait(lambda: server.status() == "ready", "the stage to be tried again")
        assert server.http.post("/v1/audio/speech", json=speech | {"input": "a word"}).status_code == 200


def test_exit_on_failed_stage_ends_the_server_with_its_reason(start: Start) -> None:
    with start("--exit-on-failed-stage", "-s", "stages.mouth.restart={intensity: 0}", config=MOUTH) as server:
        server.http.post("/v1/audio/speech", json={"model": "studio", "input": "a deadly word"})
        assert server.wait_end() == 1
        assert "stage 'mouth'" in server.stderr
        assert "exited with code 3" in server.stderr
