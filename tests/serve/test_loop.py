"""No request blocks the event loop: a server in this process, and the cost of each step of each of its tasks.

Steps are measured in CPU time of the loop's thread. Other processes of a busy machine, and the clients' threads in this
one, do not count; a full collection of garbage and a decoder that keeps the interpreter's lock do.
"""

from __future__ import annotations

import base64
import gc
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from http.client import HTTPConnection

import pytest
import trio

from omni_actors.config import Pipeline, Stage
from omni_actors.serve import app
from omni_actors.serve.server import serve
from omni_actors.serve.settings import ServerSettings
from omni_actors.system.garbage import MIDDLE_PER_FULL

MAX_STEP_S = 0.1
WATCHDOG_S = 60.0
AT_A_TIME = 6
"""Bodies that are sent at the same time. The server's budget has to hold them all, so that it decodes each of them."""
SIZE = 32_000_000
"""The bytes of a body, a little less than the default limit."""
CHAT, TRANSCRIPTIONS = "/v1/chat/completions", "/v1/audio/transcriptions"


class Meter(trio.abc.Instrument):
    """longest_s: the CPU time of the longest step of any task, and the task's name."""

    def __init__(self) -> None:
        self.longest_s, self.by, self._began = 0.0, "", math.inf

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        took = time.thread_time() - self._began
        if took > self.longest_s:
            self.longest_s, self.by = took, task.name


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    """Run a server in this event loop during the block, and yield its URL."""
    stage = Stage(engine="echo", accepts=("audio", "image", "messages", "script"), emits="text")
    pipeline = Pipeline(name="studio", stages={"mind": stage})
    urls: list[str] = []
    ready = trio.Event()

    def announce(line: str) -> None:
        if line.startswith("ready: "):
            urls.append(line.removeprefix("ready: ").partition("/v1")[0])
            ready.set()

    thresholds = gc.get_threshold()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(serve, pipeline, ServerSettings(port=0), announce=announce))
        await ready.wait()
        try:
            yield urls[0]
        finally:
            nursery.cancel_scope.cancel()
            gc.unfreeze()
            gc.set_threshold(*thresholds)


def filled(head: bytes, unit: bytes, tail: bytes = b"") -> bytes:
    return head + unit * ((SIZE - len(head) - len(tail)) // len(unit)) + tail


def chat(value: bytes, unit: bytes, tail: bytes) -> bytes:
    return filled(b'{"model": "studio", "messages": [{"role": "user", "content": ' + value, unit, tail)


PART = b'--XX\r\nContent-Disposition: form-data; name="%s"\r\n\r\n'
FILE = PART % b'file"; filename="a.wav'
END = b"\r\n--XX--\r\n"

JSON_BODIES = [
    filled(b"", b"[],"),
    filled(b"", b'{"a":'),
    filled(b"", b"["),
    filled(b"", b'"'),
    filled(b"", b" ", b"{}"),
    filled(b'{"a": [', b"9e-324,", b"1]}"),
    filled(b'{"a": [', b'{"a": {}},', b"1]}"),
    filled(b'{"a": [', b"1" * 4000 + b",", b"1]}"),
    filled(b'{"', b"A", b'": 1}'),
    filled(b'{"model": "', b"A", b'", "messages": [{"role": "user", "content": ""}]}'),
    filled(b'{"model": "studio", "messages": [{"role": "', b"A", b'"}]}'),
    filled(b'{"model": "studio", "messages": [{"role": "user", "content": ""}], "n": "', rb"\u0000", b'"}'),
    chat(b'"', b"\\n", b'"}]}'),
    chat(b'"', rb"\ud83d\ude00", b'"}]}'),
    chat(b'"\xf0\x9f\x98\x80', b"A", b'"}]}'),
    chat(b'[{"type": "', b"A", b'"}]}]}'),
]
"""32 MB each, and each of them refused."""

FORMS = [
    filled(FILE, b"A", END),
    filled(FILE, b"\r\n--X", END),
    filled(FILE, b"\r", END),
    filled(b"", PART % b"a" + b"\r\n"),
    filled(b"--XX\r\n", b"a: b\r\n"),
    filled(b"--XX\r\nContent-Disposition: ", b";a=b"),
    filled(b"", b"\r\n"),
    filled(PART % b"model", b"A", END),
]


def ask(url: str, method: str, path: str, body: bytes = b"", content_type: str = "") -> tuple[int, bytes]:
    """Return the status and the body of a response, on a new connection. It blocks, so it needs a thread."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=WATCHDOG_S)
    try:
        connection.request(method, path, body, {"content-type": content_type})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.perf
async def test_no_body_blocks_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hostile bodies are refused, six at a time. Meanwhile the server answers other requests."""
    monkeypatch.setattr(app, "BODY_BUDGET_FACTOR", AT_A_TIME)
    meter = Meter()
    bodies = [(CHAT, body, "application/json") for body in JSON_BODIES]
    bodies += [(TRANSCRIPTIONS, body, "multipart/form-data; boundary=XX") for body in FORMS]

    async def send() -> None:
        while bodies:
            path, body, content_type = bodies.pop()
            status, answer = await trio.to_thread.run_sync(ask, url, "POST", path, body, content_type)
            assert (status, len(answer) < 4096) == (400, True), answer[:1000]

    async def look() -> None:
        while True:
            status, _ = await trio.to_thread.run_sync(ask, url, "GET", "/health")
            assert status == 200

    async with serving() as url:
        trio.lowlevel.add_instrument(meter)
        async with trio.open_nursery() as looking:
            looking.start_soon(look)
            async with trio.open_nursery() as sending:
                for _ in range(AT_A_TIME):
                    sending.start_soon(send)
            looking.cancel_scope.cancel()
    assert 0 < meter.longest_s < MAX_STEP_S, meter.by


@pytest.mark.perf
async def test_a_file_as_large_as_a_body_does_not_block_the_event_loop() -> None:
    meter = Meter()
    data = base64.b64encode(bytes(SIZE * 3 // 4 - 1000)).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "text", "text": "hi"},
    ]
    body = json.dumps({"model": "studio", "messages": [{"role": "user", "content": parts}]}).encode()
    async with serving() as url:
        trio.lowlevel.add_instrument(meter)
        status, answer = await trio.to_thread.run_sync(ask, url, "POST", CHAT, body, "application/json")
    assert status == 200, answer[:1000]
    assert 0 < meter.longest_s < MAX_STEP_S, meter.by


async def test_full_garbage_collections_are_rare_and_skip_imported_objects() -> None:
    async with serving():
        assert gc.get_freeze_count() > 10_000
        assert gc.get_threshold()[2] == MIDDLE_PER_FULL
