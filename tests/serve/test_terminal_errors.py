"""The terminal commands with servers that refuse, are silent, or send hostile text. The servers are plain sockets."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest
import trio
from click.testing import CliRunner, Result

from omni_actors.cli import main
from omni_actors.cli.bench.self_test import bare_server
from omni_actors.cli.server_client import MAX_EVENT_BYTES, MAX_VALUE_BYTES, ServerError, decoding

WATCHDOG_S = 60.0
REFUSAL = (503, b'{"error": {"message": "busy", "code": "overloaded"}}')


def answered(*deltas: dict[str, Any], ends: bool = True) -> tuple[int, bytes]:
    """Return a streamed answer."""
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    events = [json.dumps(each) for each in [*chunks, *([last] if ends else [])]] + ["[DONE]"] * ends
    return 200, b"".join(f"data: {event}\n\n".encode() for event in events)


class Scripted:
    """A server that gives the answers of a list to its POST requests, one after the other."""

    def __init__(self, model: str = "any") -> None:
        self.answers: list[tuple[int, bytes]] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.media_type = "text/plain"
        """Of an answer that is no stream of events."""
        self.listed: bytes = json.dumps({"data": [{"id": model}]}).encode()
        self.has_end = True
        """Whether an answer ends. One without an end goes on until the client leaves."""
        self.before_answer: Callable[[], object] = lambda: None
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(200, scripted.listed)

            def do_POST(self) -> None:
                scripted.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                scripted.keys.append(self.headers["authorization"])
                scripted.before_answer()
                self.reply(*scripted.answers.pop(0))

            def reply(self, status: int, body: bytes) -> None:
                self.send_response(status)
                is_stream = body.startswith((b"data", b"event"))
                self.send_header("content-type", "text/event-stream" if is_stream else scripted.media_type)
                if scripted.has_end or not is_stream:
                    self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                while is_stream and not scripted.has_end:
                    try:
                        self.wfile.write(b"data: {}\n\n")
                    except ConnectionError:
                        return

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    server = Scripted()
    thread = Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


@pytest.fixture
def player(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program with the name of a player, on a PATH of its own."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "aplay"
    program.write_text("#!/bin/sh\nexec /bin/cat > /dev/null\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))


def chat(server: Scripted, messages: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["chat", "--url", server.url, *arguments], input=messages)


@pytest.mark.parametrize("command", [["chat"], ["top", "--once"], ["bench"]])
def test_a_url_that_is_none_is_a_wrong_argument(command: list[str]) -> None:
    result = CliRunner().invoke(main, [*command, "--url", "nonsense"])
    assert result.exit_code == 2
    assert "Invalid value for --url: 'nonsense' is not a URL such as" in result.stderr


@pytest.mark.usefixtures("player")
def test_a_refusal_is_one_line_while_a_player_runs(scripted: Scripted) -> None:
    scripted.answers = [REFUSAL, answered({"content": "hi"})]
    result = chat(scripted, "one\ntwo\n", "--play")
    assert (result.exit_code, result.stdout) == (1, "\nhi\n"), result.stderr
    assert result.stderr == "busy (status 503)\n"


@pytest.mark.parametrize("body", [b'{"error": "gr\xfc\xdf"}', b'{"a": ' + b"[" * 5000])
def test_a_refusal_that_is_no_json_is_one_line(body: bytes, scripted: Scripted) -> None:
    scripted.answers = [(500, body), answered({"content": "hi"}), (500, body)]
    result = chat(scripted, "one\ntwo\n")
    assert (result.exit_code, result.stdout) == (1, "\nhi\n"), result.exception
    assert "(status 500)" in " ".join(result.stderr.split())
    result = CliRunner().invoke(main, ["bench", "--url", scripted.url, "--requests", "1", "--warmup", "0"])
    assert "errors: 1 × 500" in result.stdout, result.exception


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("no program", "aplay cannot be run: Exec format error"),
        ("#!/bin/sh\nexit 1\n", "aplay has failed (exit code 1): the sound may not have been played"),
        ("#!/bin/sh\nkill -9 $$\n", "aplay has failed (SIGKILL): the sound may not have been played"),
    ],
)
def test_a_player_that_fails_costs_only_the_sound(
    scripted: Scripted, player: None, tmp_path: Path, program: str, reason: str
) -> None:
    (tmp_path / "bin" / "aplay").write_text(program)
    scripted.answers = [answered({"content": "hi"}, {"audio": {"data": "AAAA" * 160}})] * 2
    result = chat(scripted, "one\ntwo\n", "--play", "-o", str(tmp_path))
    assert (result.exit_code, result.stdout) == (0, "hi\nhi\n"), result.exception
    assert " ".join(result.stderr.split()).count(reason) == 2
    assert (tmp_path / "answer-2.wav").exists()


def test_an_interrupt_of_the_terminal_does_not_reach_the_player(
    scripted: Scripted, player: None, tmp_path: Path
) -> None:
    """It stops an answer. A player that died of it first would be a failure."""
    program = f'#!/bin/sh\nread -r stat < /proc/$$/stat\necho "$stat" > {tmp_path}/stat\nexec /bin/cat > /dev/null\n'
    (tmp_path / "bin" / "aplay").write_text(program)
    scripted.answers = [answered({"content": "hi"}, {"audio": {"data": "AAAA" * 160}})]
    result = chat(scripted, "one\n", "--play")
    assert (result.exit_code, result.stderr.count("failed")) == (0, 0), result.exception
    session = (tmp_path / "stat").read_text().split()[5]
    assert int(session) != os.getsid(0)


def test_a_file_that_cannot_be_written_is_one_line(scripted: Scripted, tmp_path: Path) -> None:
    (folder := tmp_path / "answers").mkdir()
    scripted.before_answer = folder.rmdir
    scripted.answers = [answered({"audio": {"data": "AAAA" * 160}})]
    result = chat(scripted, "one\n", "-o", str(folder))
    assert result.exit_code == 1
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "the spoken answer cannot be written" in result.stderr
    assert len(result.stderr.splitlines()) <= 3, "one sentence, and no traceback"


@pytest.mark.parametrize("failure", [REFUSAL, answered({"content": "half"}, ends=False)], ids=["refused", "broken"])
def test_after_a_failure_the_conversation_is_as_before(
    failure: tuple[int, bytes], scripted: Scripted, recording: Callable[..., bytes], tmp_path: Path
) -> None:
    (tmp_path / "q.wav").write_bytes(recording())
    scripted.answers = [failure, answered({"content": "yes"})]
    chat(scripted, f"/audio {tmp_path}/q.wav\nfirst\nagain\n", "--commands")
    first, again = (body["messages"] for body in scripted.bodies)
    assert len(first) == len(again) == 1
    assert again[0]["content"][:-1] == first[0]["content"][:-1], "the sound goes with the next message"
    assert again[0]["content"][-1]["text"] == "again"


def test_an_answer_of_sound_alone_stays_in_the_conversation_without_words(scripted: Scripted) -> None:
    scripted.answers = [answered({"audio": {"data": "AAAA" * 160}}), answered({"content": "yes"})]
    chat(scripted, "sing\nagain\n")
    assert [(each["role"], each["content"]) for each in scripted.bodies[1]["messages"]] == [
        ("user", "sing"),
        ("assistant", ""),
        ("user", "again"),
    ]


HOSTILE = "[red]evil[/] \x1b]0;title\x07\x9b2J\u202egnp.exe\r\nand [bold]more"
CLEANED = "[red]evil[/] ]0;title2Jgnp.exe and [bold]more"
"""As it must be printed: visible, in one line, and without effect."""


def hostile_refusal() -> tuple[int, bytes]:
    return 400, json.dumps({"error": {"message": HOSTILE, "code": HOSTILE}}).encode()


@pytest.fixture
def hostile(scripted: Scripted) -> Scripted:
    scripted.listed = json.dumps({"data": [{"id": HOSTILE}]}).encode()
    return scripted


def is_harmless(result: Result) -> bool:
    return not set("\x1b\x07\x9b\u202e\r") & set(result.stdout + result.stderr)


def test_texts_of_a_server_do_not_control_the_terminal_of_chat(hostile: Scripted) -> None:
    hostile.answers = [answered({"content": HOSTILE}), hostile_refusal()]
    result = chat(hostile, "one\ntwo\n/model\n/model other\n", "--commands")
    assert is_harmless(result), repr(result.output)
    assert result.stdout.startswith("[red]evil[/] ]0;title2Jgnp.exe\nand [bold]more\n"), "an answer keeps its lines"
    unwrapped = result.stderr.replace("\n", " ")
    assert f"{CLEANED} (status 400)" in unwrapped
    assert f"* {CLEANED}" in unwrapped
    assert "there is no model 'other'" in unwrapped
    assert [body["model"] for body in hostile.bodies] == [HOSTILE, HOSTILE], "the server gets its own name back"


def test_texts_of_a_server_do_not_control_the_terminal_of_bench(hostile: Scripted) -> None:
    hostile.answers = [hostile_refusal()] * 2
    arguments = ["bench", "--url", hostile.url, "--requests", "2", "--warmup", "0"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert is_harmless(result), repr(result.output)
    assert f"errors: 2 × 400 {CLEANED}" in result.stdout


def test_texts_of_a_server_do_not_control_the_terminal_of_top(hostile: Scripted) -> None:
    replica = {"state": HOSTILE, "generation": 1, "restarts": 0, "requests": 0, "note": HOSTILE, "standby": False}
    stage = {
        "engine": HOSTILE,
        "wanted": 1,
        "accepts": [],
        "inputs": [],
        "replicas": {"0": replica},
        "step_timeout_s": 1.0,
    }
    request = {"name": HOSTILE, "state": "failed", "submitted": 0.0, "stages": [], "bars": [], "total_s": 1.0}
    failure = {"type": "E", "message": HOSTILE}
    state = {"at": 0.0, "pipeline": HOSTILE, "ready": True, "errored": True, "error": HOSTILE, "in_flight": 0}
    state |= {"waiting": 0, "max_requests": 1, "rings": {}, "stages": {HOSTILE: stage}}
    state["requests"] = {"r": {**request, "failure": failure}}
    hostile.listed = b"event: state\ndata: " + json.dumps(state).encode() + b"\n\n"
    result = CliRunner().invoke(main, ["top", "--url", hostile.url, "--once", "--interval", "0.1"])
    assert hostile.listed.startswith(b"event")
    assert result.exit_code == 0, result.stderr
    assert is_harmless(result), repr(result.output)
    assert result.stdout.startswith(f"{CLEANED} at ")
    assert result.stdout.count("[red]evil[/]") >= 5


def test_a_server_that_goes_on_after_an_error_is_left(scripted: Scripted) -> None:
    scripted.has_end = False
    scripted.answers = [(200, b'data: {"error": {"message": "broken"}}\n\n'), (200, b"data: [1]\n\n")]
    result = chat(scripted, "one\ntwo\n")
    assert result.exit_code == 1
    broken, unexpected = result.stderr.splitlines()
    assert broken == "broken"
    assert unexpected.startswith("an event of the answer has an unexpected form")


@pytest.mark.parametrize(
    "delta",
    [
        '{"audio": {"data": "é"}}',
        '{"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,é"}}]}',
        '{"content": [{"x": ' + "[" * 50_000 + "]" * 50_000 + "}]}",
    ],
)
def test_an_event_that_cannot_be_decoded_is_an_error_of_its_message(scripted: Scripted, delta: str) -> None:
    event = f'data: {{"choices": [{{"delta": {delta}}}]}}\n\n'.encode()
    scripted.answers = [(200, event), (200, event)]
    result = chat(scripted, "one\ntwo\n")
    assert result.exit_code == 1
    assert result.stderr.count("an event of the answer has an unexpected form") == 2, result.exception


def test_an_answer_that_is_nested_too_deeply_is_invalid() -> None:
    with pytest.raises(ServerError) as caught, decoding():
        msgspec.json.decode("[" * 5000)
    assert caught.value.kind == "invalid answer"


def test_a_list_of_models_without_end_is_refused(scripted: Scripted) -> None:
    scripted.listed = b'{"data": [' + b'{"id": "m"},' * (MAX_VALUE_BYTES // 12) + b'{"id": "m"}]}'
    result = chat(scripted, "one\n")
    assert result.exit_code == 1
    assert result.stderr == f"Error: the server's answer is longer than {MAX_VALUE_BYTES} bytes\n"


def test_models_whose_names_are_no_text_are_an_invalid_answer(scripted: Scripted) -> None:
    scripted.listed = b'{"data": [{"id": 5}]}'
    result = chat(scripted, "one\n")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: the server's answer has an unexpected form"), result.exception


def test_a_picture_without_end_is_an_error_of_its_kind(scripted: Scripted) -> None:
    scripted.answers = [(200, b'{"data": "' + b"x" * MAX_EVENT_BYTES + b'"}')]
    arguments = ["bench", "--url", scripted.url, "--endpoint", "images", "--requests", "1", "--warmup", "0"]
    result = CliRunner().invoke(main, arguments)
    assert "errors: 1 × invalid answer" in result.stdout


def test_a_warm_up_that_takes_too_long_is_one_sentence() -> None:
    result = CliRunner().invoke(main, ["bench", "--self-test", "--timeout", "0.05"])
    assert result.exit_code == 1
    assert "a request of the warm-up took longer than 0.05 s (--timeout)" in result.stderr


def test_the_self_test_refuses_other_endpoints() -> None:
    result = CliRunner().invoke(main, ["bench", "--self-test", "--endpoint", "transcriptions"])
    assert result.exit_code == 2
    assert "--self-test needs --endpoint chat" in result.stderr


def test_a_bare_server_that_dies_at_once_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start() -> None:
        with trio.fail_after(WATCHDOG_S):
            async with bare_server():
                pytest.fail("the server did not start")

    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(ServerError, match="ended before it printed its URL"):
        trio.run(start)


@pytest.mark.parametrize("command", [["chat"], ["top", "--once"], ["bench"]])
@pytest.mark.parametrize("key", ["schlüssel", "one\ntwo"])
def test_a_key_that_no_header_can_carry_is_a_wrong_argument(command: list[str], key: str) -> None:
    result = CliRunner().invoke(main, [*command, "--api-key", key])
    assert result.exit_code == 2
    assert "printable ASCII characters only" in result.stderr
    assert key not in result.stderr


def test_a_key_of_a_file_may_end_with_a_newline(scripted: Scripted) -> None:
    scripted.answers = [answered({"content": "yes"})]
    result = CliRunner().invoke(main, ["chat", "--url", scripted.url], input="hi\n", env={"OPENAI_API_KEY": "a key\n"})
    assert (result.exit_code, result.stdout) == (0, "yes\n"), result.stderr
    assert scripted.keys == ["Bearer a key"]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("/audio ~no_such_user/a.wav", "Could not determine home directory"),
        ("/save ~no_such_user/a.json", "Could not determine home directory"),
        ("/audio a\0.wav", "embedded null"),
        ("/save a\0.json", "embedded null"),
        ("/audio {folder}/pipe.wav", "not a file"),
        ("/image {folder}/folder.png", "not a file"),
    ],
)
def test_a_path_that_is_no_file_is_one_line_and_the_conversation_goes_on(
    command: str, reason: str, scripted: Scripted, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe.wav")
    (tmp_path / "folder.png").mkdir()
    scripted.answers = [answered({"content": "yes"})]
    result = chat(scripted, f"{command.format(folder=tmp_path)}\nhi\n", "--commands")
    assert (result.exit_code, result.stdout) == (1, "yes\n"), result.stderr
    assert reason in " ".join(result.stderr.split())


def test_thoughts_are_measured_as_text_and_not_printed(scripted: Scripted, tmp_path: Path) -> None:
    thoughts = [{"reasoning_content": "hm"}, {"reasoning": "ah", "content": None}, {"reasoning": ["odd"]}]
    answer = answered(*thoughts, {"content": "yes"})
    scripted.answers = [answer]
    file = tmp_path / "figures.json"
    few = ["--requests", "1", "--warmup", "0", "--json", str(file)]
    assert CliRunner().invoke(main, ["bench", "--url", scripted.url, *few]).exit_code == 0
    assert json.loads(file.read_bytes())["figures"]["itl"]["count"] == 2
    scripted.answers = [answer]
    assert chat(scripted, "hi\n").stdout == "yes\n"


@pytest.mark.parametrize(
    ("media_type", "body", "kind"),
    [
        ("application/json", b'{"detail": "no voice"}', "1 × invalid answer"),
        ("audio/pcm", b"", "1 × incomplete answer"),
    ],
)
def test_speech_without_sound_is_an_error(media_type: str, body: bytes, kind: str, scripted: Scripted) -> None:
    scripted.media_type, scripted.answers = media_type, [(200, body)]
    few = ["--endpoint", "speech", "--requests", "1", "--warmup", "0"]
    result = CliRunner().invoke(main, ["bench", "--url", scripted.url, *few])
    assert result.exit_code == 1
    assert f"errors: {kind}" in result.stdout


def test_figures_that_cannot_be_written_are_printed(scripted: Scripted, tmp_path: Path) -> None:
    (folder := tmp_path / "figures").mkdir()
    scripted.before_answer = folder.rmdir
    scripted.answers = [answered({"content": "yes"})]
    few = ["--requests", "1", "--warmup", "0", "--json", str(folder / "figures.json")]
    result = CliRunner().invoke(main, ["bench", "--url", scripted.url, *few])
    assert "1 of 1 requests succeeded" in result.stdout
    assert result.exit_code == 1
    assert "a file cannot be written" in result.stderr
