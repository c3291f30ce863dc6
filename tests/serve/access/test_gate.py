"""The request gate: places and bytes are counted, and given back however a request ends."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import soundfile
import trio
import trio.testing
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_actors.outputs import AudioChunk
from omni_actors.serve.access import admission
from omni_actors.serve.access.admission import SCOPE_KEY, UPLOAD_GRACE_S, AdmissionControl
from omni_actors.serve.access.gate import BODY_TIMEOUT_S, MAX_QUERY_BYTES, MAX_SUBPROTOCOLS, RequestGate
from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.media import audio
from tests.serve.media.loading import ticket
from tests.support.admission import StubSystem


class Handler:
    """An application that reads its body, releases its ticket once it may start, and answers once it may answer."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.may_start, self.may_answer = trio.Event(), trio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.bodies.append((await receive())["body"])
        await self.may_start.wait()
        if scope[SCOPE_KEY] is not None:
            scope[SCOPE_KEY].release()
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


class GateFixture:
    """A request gate with its handler: three places, 100 bytes for all bodies, 60 for one body."""

    def __init__(self, app: ASGIApp | None = None, api_key: str | None = None) -> None:
        self.handler, self.system = Handler(), StubSystem(max_requests=3)
        system: Any = self.system
        self.admission = AdmissionControl(system, max_bytes=100, max_request_bytes=60)
        self.app = RequestGate(
            app or self.handler,
            CollectorRegistry(),
            api_key=api_key,
            max_body_bytes=60,
            public=(),
            routes=(),
            websockets=("/talk",),
            admit=lambda path: self.admission.admit() if path == "/work" else None,
        )

    def state(self) -> tuple[int, int]:
        """Return the number of free places, and of bytes that are held."""
        taken = []
        with suppress(HTTPError):
            while True:
                taken.append(self.admission.admit())
                taken[-1].take_place()
        for each in taken:
            each.release()
        return len(taken), self.admission.bytes


class TestClient:
    """A client that exchanges ASGI messages with the gate. more: more fields of the scope."""

    __test__ = False  # for pytest

    def __init__(
        self,
        gate: GateFixture,
        nursery: trio.Nursery,
        path: str = "/work",
        on_answer: Callable[[], None] = lambda: None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        **more: Any,
    ) -> None:
        self._messages, receive = trio.open_memory_channel[Message](100)
        self.answer: list[Message] = []

        async def send(message: Message) -> None:
            await trio.lowlevel.checkpoint()
            on_answer()
            self.answer.append(message)

        self._connection = trio.CancelScope()

        async def call() -> None:
            scope = {"type": "http", "path": path, "headers": headers, "query_string": b"", **more}
            with self._connection:
                await gate.app(scope, receive.receive, send)

        nursery.start_soon(call)

    async def send(self, body: bytes, *, more: bool = False) -> None:
        await self._receive({"type": "http.request", "body": body, "more_body": more})

    async def disconnect(self) -> None:
        """Cancel the request, as a connection does when its client disconnects."""
        self._connection.cancel()
        await trio.testing.wait_all_tasks_blocked()

    async def _receive(self, message: Message) -> None:
        self._messages.send_nowait(message)
        await trio.testing.wait_all_tasks_blocked()

    @property
    def status(self) -> int:
        status: int = self.answer[0]["status"]
        return status

    @property
    def retry_after(self) -> str:
        headers: dict[bytes, bytes] = dict(self.answer[0]["headers"])
        return headers.get(b"retry-after", b"").decode()


@pytest.mark.parametrize(("encoding", "status"), [(b"gzip", 415), (b"br", 415), (b"identity", 200), (b"Identity", 200)])
async def test_a_compressed_body_is_refused(nursery: trio.Nursery, encoding: bytes, status: int) -> None:
    gate = GateFixture()
    gate.handler.may_start.set()
    gate.handler.may_answer.set()
    client = TestClient(gate, nursery, headers=[(b"content-encoding", encoding)])
    await client.send(bytes(20))
    assert client.status == status
    assert gate.state() == (3, 0)


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_a_long_query_is_refused_before_anything_parses_it(nursery: trio.Nursery, kind: str) -> None:
    gate = GateFixture()
    client = TestClient(gate, nursery, type=kind, query_string=b"a&" * (MAX_QUERY_BYTES // 2) + b"a")
    await trio.testing.wait_all_tasks_blocked()
    assert client.status == 414
    assert (gate.handler.bodies, gate.state()) == ([], (3, 0))


async def test_a_query_at_the_limit_is_passed_on(nursery: trio.Nursery) -> None:
    gate = GateFixture()
    gate.handler.may_start.set()
    gate.handler.may_answer.set()
    client = TestClient(gate, nursery, query_string=b"a" * MAX_QUERY_BYTES)
    await client.send(b"")
    assert client.status == 200


@pytest.mark.parametrize(("others", "is_let_in"), [(MAX_SUBPROTOCOLS - 1, True), (MAX_SUBPROTOCOLS, False)])
@pytest.mark.parametrize("key", ["openai-insecure-api-key.sesame", "omni-actors-base64url-api-key.c2VzYW1l"])
async def test_the_key_is_looked_for_among_the_first_subprotocols(
    nursery: trio.Nursery, key: str, *, others: int, is_let_in: bool
) -> None:
    async def accept(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept"})

    gate = GateFixture(accept, api_key="sesame")
    client = TestClient(gate, nursery, path="/talk", type="websocket", subprotocols=["a"] * others + [key])
    await trio.testing.wait_all_tasks_blocked()
    assert [message.get("status", 101) for message in client.answer][:1] == [101 if is_let_in else 401]


async def test_many_subprotocols_cost_a_few_comparisons(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(given: bytes, expected: bytes) -> bool:
        compared.append(given)
        return False

    gate = GateFixture(api_key="sesame")
    monkeypatch.setattr("hmac.compare_digest", compare)
    client = TestClient(gate, nursery, path="/talk", type="websocket", subprotocols=["a"] * 32_000)
    await trio.testing.wait_all_tasks_blocked()
    assert client.status == 401
    assert len(compared) == 2 * MAX_SUBPROTOCOLS


async def test_an_upload_holds_bytes_and_a_complete_request_also_a_place(nursery: trio.Nursery) -> None:
    gate = GateFixture()
    client = TestClient(gate, nursery)
    await client.send(bytes(20), more=True)
    assert gate.state() == (3, 20)
    await client.send(bytes(30))
    assert gate.handler.bodies == [bytes(50)]
    assert gate.state() == (2, 50)
    gate.handler.may_start.set()
    await trio.testing.wait_all_tasks_blocked()
    assert gate.state() == (3, 0)
    assert not client.answer
    gate.handler.may_answer.set()
    await trio.testing.wait_all_tasks_blocked()
    assert client.status == 200
    assert gate.state() == (3, 0)


@pytest.mark.parametrize("in_flight", [0, 2, 3])
async def test_whole_requests_and_those_in_flight_share_the_places(nursery: trio.Nursery, in_flight: int) -> None:
    gate = GateFixture()
    gate.system.in_flight = in_flight
    clients = [TestClient(gate, nursery) for _ in range(4)]
    for client in clients:
        await client.send(b"x")
    assert len(gate.handler.bodies) == 3 - in_flight
    refused = [client for client in clients if client.answer]
    assert [(client.status, client.retry_after) for client in refused] == [(429, "7")] * (1 + in_flight)


async def test_a_full_system_refuses_a_request_on_its_head(nursery: trio.Nursery) -> None:
    gate = GateFixture()
    gate.system.in_flight = 3
    client = TestClient(gate, nursery)
    await trio.testing.wait_all_tasks_blocked()
    assert client.status == 429


async def test_a_body_that_is_declared_too_large_is_refused_on_its_head(nursery: trio.Nursery) -> None:
    client = TestClient(GateFixture(), nursery, headers=[(b"content-length", b"61")])
    await trio.testing.wait_all_tasks_blocked()
    assert client.status == 413


async def test_bodies_share_one_budget_and_a_newcomer_that_passes_it_is_refused(nursery: trio.Nursery) -> None:
    gate = GateFixture()
    first, second, third = (TestClient(gate, nursery) for _ in range(3))
    await first.send(bytes(60))
    await second.send(bytes(40), more=True)
    assert gate.state() == (2, 100)
    await third.send(b"x", more=True)
    assert (third.status, third.retry_after) == (429, "7")
    assert gate.state() == (2, 100)
    await second.send(b"")
    assert gate.handler.bodies == [bytes(60), bytes(40)]


async def test_the_slowest_upload_makes_room_for_others(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Only an upload past its grace period is ended, and no request with a complete body."""
    gate = GateFixture()
    whole, quick, slow = (TestClient(gate, nursery) for _ in range(3))
    await whole.send(bytes(10))
    await quick.send(bytes(50), more=True)
    await slow.send(bytes(40), more=True)
    await trio.sleep(UPLOAD_GRACE_S)
    newcomer = TestClient(gate, nursery)
    await newcomer.send(bytes(30), more=True)
    assert slow.status == 408
    assert gate.state() == (2, 90)
    await quick.send(b"")
    await newcomer.send(b"")
    assert gate.handler.bodies == [bytes(10), bytes(50), bytes(30)]


async def test_an_upload_that_is_itself_the_slowest_ends(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    gate = GateFixture()
    quick, slow = (TestClient(gate, nursery) for _ in range(2))
    await quick.send(bytes(60), more=True)
    await slow.send(bytes(40), more=True)
    await trio.sleep(UPLOAD_GRACE_S)
    await slow.send(b"x")
    assert slow.status == 408
    assert gate.state() == (3, 60)
    assert not gate.handler.bodies


@pytest.mark.parametrize("sent", [0, 50])
async def test_a_client_that_leaves_before_its_request_is_whole_holds_nothing(nursery: trio.Nursery, sent: int) -> None:
    gate = GateFixture()
    client = TestClient(gate, nursery)
    await client.send(bytes(sent), more=True)
    assert gate.state() == (3, sent)
    await client.disconnect()
    assert (gate.state(), client.answer) == ((3, 0), [])


async def test_a_client_that_leaves_before_its_work_begins_holds_nothing(nursery: trio.Nursery) -> None:
    gate = GateFixture()
    client = TestClient(gate, nursery)
    await client.send(bytes(50))
    assert gate.state() == (2, 50)
    await client.disconnect()
    assert (gate.state(), client.answer) == ((3, 0), [])


async def test_a_body_over_its_own_limit_is_refused_at_once(nursery: trio.Nursery) -> None:
    gate = GateFixture()
    client = TestClient(gate, nursery)
    await client.send(bytes(61), more=True)
    assert gate.state() == (3, 0)
    assert client.status == 413


async def test_a_body_that_does_not_arrive_gives_its_bytes_back(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Slow bytes do not extend the time."""
    gate = GateFixture()
    client = TestClient(gate, nursery)
    for _ in range(int(BODY_TIMEOUT_S / 2)):
        await client.send(b"x", more=True)
        await trio.sleep(2)
    await trio.sleep(0.1)
    assert client.status == 408
    assert gate.state() == (3, 0)


async def test_a_place_is_free_before_its_client_sees_the_answer(nursery: trio.Nursery) -> None:
    """Also if the handler refuses the request."""
    free: list[tuple[int, int]] = []

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    gate = GateFixture(refuse)
    client = TestClient(gate, nursery, on_answer=lambda: free.append(gate.state()))
    await client.send(bytes(50))
    assert free[0] == (3, 0)


async def test_a_body_that_no_handler_reads_is_not_kept(nursery: trio.Nursery) -> None:
    gate = GateFixture()
    client = TestClient(gate, nursery, "/health")
    await client.send(bytes(60))
    assert gate.handler.bodies == [b""]
    assert gate.state() == (3, 0)


async def test_decoded_audio_counts_until_its_response_has_ended(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the system has the request then, and its bytes and its place are given back."""
    may_answer = trio.Event()

    async def hear(scope: Scope, receive: Receive, send: Send) -> None:
        size = len((await receive())["body"])
        scope[SCOPE_KEY].add_audio(1000 * size)
        scope[SCOPE_KEY].release()
        await may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    monkeypatch.setattr(admission, "MAX_AUDIO_BYTES", 10_000)
    gate = GateFixture(hear)
    first, leaver, late = (TestClient(gate, nursery) for _ in range(3))
    await first.send(bytes(6))
    await leaver.send(bytes(4))
    await late.send(bytes(1))
    assert (gate.state(), gate.admission.audio_bytes) == ((3, 0), 10_000)
    assert (first.answer, late.status) == ([], 429)
    await leaver.disconnect()
    assert gate.admission.audio_bytes == 6000
    may_answer.set()
    await trio.testing.wait_all_tasks_blocked()
    assert (first.status, gate.admission.audio_bytes) == (200, 0)


async def test_two_files_are_decoded_at_a_time(
    nursery: trio.Nursery, recording: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third waits until one of them is done."""
    at_work, may_go_on = threading.Semaphore(0), threading.Event()
    inside: list[str] = []
    read = audio._decode

    def slowly(data: bytes, param: str, max_s: float, max_samples: int) -> AudioChunk | str:
        inside.append(param)
        at_work.release()
        assert may_go_on.wait(60)
        return read(data, param, max_s, max_samples)

    monkeypatch.setattr(audio, "_decode", slowly)
    clips: list[Any] = []

    async def ask(param: str) -> None:
        clips.extend(await audio.decode([(recording(0.5), param)], ticket()))

    for param in "abc":
        nursery.start_soon(ask, param)
    for _ in range(2):
        await trio.to_thread.run_sync(at_work.acquire)
    await trio.testing.wait_all_tasks_blocked()
    assert len(inside) == 2
    may_go_on.set()
    await trio.to_thread.run_sync(at_work.acquire)
    with trio.fail_after(60):
        while len(clips) < 3:
            await trio.lowlevel.checkpoint()
    assert [clip.duration_s for clip in clips] == [0.5] * 3


async def test_a_file_of_many_blocks_is_decoded_exactly(recording: Any) -> None:
    tone = np.sin(np.arange(3 * audio._BLOCK + 7) / 50).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, np.stack([tone, np.zeros_like(tone)], axis=1), 48000, format="WAV", subtype="FLOAT")
    [clip] = await audio.decode([(file.getvalue(), "file")], ticket())
    assert clip.sample_rate == 48000
    assert np.array_equal(clip.samples, tone / 2)
