"""Hostile sessions: bad JSON, wrong order, floods, broken frames, half-open sockets, events that are too large.

While a session's frames are intact, a bad event is answered with an error that names it. What ends a session is
answered with a close code. Broken frames end the connection, at the latest when the client ends its side. Beside them
a session that does nothing wrong gets its answers. Afterwards nothing of the hostile sessions is left.
"""

from __future__ import annotations

import functools
import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect
from websockets.utils import accept_key

from bench.turns import say
from omni_actors.serve.media.base64_data import to_base64
from tests.serve.conftest import STUDIO
from tests.support.http_server import WATCHDOG_S, Server, Start, until
from tests.support.realtime import Session, check_event, pcm, session, silence

pytestmark = pytest.mark.voice

MAX_EVENT_BYTES = 100_000
SILENCE = {"type": "input_audio_buffer.append", "audio": to_base64(silence(1))}
"""It ends a turn."""
SEMANTIC = {"type": "semantic_vad", "eagerness": "high"}
LONG = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "word " * 100}]}
"""The answer to this lasts 30 s, so that speech that follows cuts it."""
CODES = {1000, 1002, 1003, 1007, 1009}
COSTLY = '{"a": [' + ",".join(["9e-324"] * 5000) + "]}"
"""Arguments of a call that would take long to decode."""
DEEP = '{"a": ' + "[" * 5000
CALLS: tuple[dict[str, Any], ...] = tuple(
    {"type": "conversation.item.create", "item": {"type": "function_call", "name": "x", "arguments": arguments}}
    for arguments in (COSTLY, DEEP, "{}")
)
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "f",
    "description": "x",
    "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}},
}
UNSENDABLE = {"tools": [{**TOOL, "parameters": {"maximum": 2**70}}]}
"""Workers cannot be sent an integer beyond 64 bits."""
SETTINGS: dict[str, Any] = {
    "instructions": "Be brief.",
    "tools": [TOOL, {"type": "function", "name": "g"}],
    "tool_choice": {"type": "function", "name": "f"},
    "max_output_tokens": 100,
    "parallel_tool_calls": True,
}
"""What a session and a response have."""
TRACING = {"workflow_name": "x", "metadata": {"n": 1}}
OUTPUT = {"format": {"type": "audio/pcma"}, "voice": {"id": "x"}}
EVENTS: tuple[dict[str, Any], ...] = (
    {"type": "session.update", "session": {**SETTINGS, "tracing": TRACING, "audio": {"output": OUTPUT}}},
    {"type": "session.update", "session": {"tools": [], "tool_choice": "auto", "max_output_tokens": "inf"}},
    {"type": "response.create", "response": {**SETTINGS, "metadata": {"a": "b"}, "audio": {"output": OUTPUT}}},
    {"type": "session.update", "session": UNSENDABLE},
    {"type": "response.create", "response": UNSENDABLE},
    {"type": "session.update", "session": {"output_modalities": ["text"]}},
    {"type": "session.update", "session": {"audio": {"input": {"format": {"type": "audio/pcmu"}}}}},
    {"type": "session.update", "session": {"audio": {"input": {"transcription": {"model": "x"}}}}},
    {"type": "session.update", "session": {"audio": {"input": {"transcription": {"language": "de"}}}}},
    {"type": "session.update", "session": {"audio": {"input": {"turn_detection": None}}}},
    {"type": "session.update", "session": {"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}},
    {"type": "session.update", "session": {"audio": {"input": {"turn_detection": SEMANTIC}}}},
    {"type": "input_audio_buffer.commit"},
    {"type": "input_audio_buffer.clear"},
    {"type": "output_audio_buffer.clear"},
    {
        "type": "conversation.item.create",
        "item": {"id": "a", "type": "message", "role": "user", "content": [{"type": "input_text", "text": "a b c"}]},
    },
    {"type": "conversation.item.truncate", "item_id": "a", "content_index": 0, "audio_end_ms": 1},
    {"type": "conversation.item.retrieve", "item_id": "a"},
    {"type": "conversation.item.delete", "item_id": "a"},
    {"type": "response.create"},
    {"type": "response.create", "response": {"conversation": "none", "input": []}},
    *CALLS,
    *({"type": "response.create", "response": {"conversation": "none", "input": [each["item"]]}} for each in CALLS),
    {"type": "response.cancel"},
)
SCRIBE = f"""\
  scribe:
    engine: llm
    model: "{Path(__file__).parent}"
    accepts: [prompt]
    emits: thoughts
    replicas: 0
    scale_from_zero: true
"""
"""A stage that takes tools, so that a session accepts them. No request starts it, so no model is needed."""
AT_A_TIME = 3
SEEN = {"input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped", "turn_detected"}
"""What the sessions of a run must have reached: turns, and answers that speech cut."""
MOST_KEPT, MOST_PER_SESSION = 100_000_000, 10_000
"""The most bytes that the server's own memory may grow by in the second half of a run: at all, and for each session.

What an allocator keeps was used at one time, by the few sessions that run at a time. The first half has loaded the
models and left as much, so the second adds up to 31 MB, and less than 1 kB for each session: routing remembers it.
"""
LAST = {"type": "conversation.item.retrieve", "event_id": "last", "item_id": "none"}
"""A bad event."""


@pytest.fixture(scope="module")
def server(start: Start) -> Iterator[Server]:
    limits = ("--max-event-bytes", str(MAX_EVENT_BYTES), "--session-items", "20")
    with start(*limits, config=STUDIO + SCRIBE) as server:
        yield server
        assert server.stderr == ""


@functools.cache
def speech() -> dict[str, Any]:
    return {"type": "input_audio_buffer.append", "audio": to_base64(pcm(say("Stop, please.")))}


def draw(rng: random.Random) -> dict[str, Any]:
    return rng.choice((*EVENTS, speech(), SILENCE))


def mutated(rng: random.Random, value: Any) -> Any:
    """An event with one value replaced by nonsense."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        return {**value, name: mutated(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], mutated(rng, value[at]), *value[at + 1 :]]
    return rng.choice([None, -1, 1e300, 2**70, "", "x" * 1000, [], {}, [[]], {"type": "x"}, True, "\0"])


def good(rng: random.Random, websocket: ClientConnection) -> None:
    websocket.send(json.dumps(draw(rng)))


def odd(rng: random.Random, websocket: ClientConnection) -> None:
    websocket.send(json.dumps(mutated(rng, draw(rng))))


def no_json(rng: random.Random, websocket: ClientConnection) -> None:
    text = json.dumps(draw(rng))
    websocket.send(rng.choice([text[: rng.randrange(len(text))], text + "}", "[" * 1000, "", "\x00", "nul"]))


def flood(rng: random.Random, websocket: ClientConnection) -> None:
    text = json.dumps(draw(rng))
    for _ in range(50):
        websocket.send(text)


def binary(rng: random.Random, websocket: ClientConnection) -> None:
    websocket.send(rng.randbytes(rng.randrange(100)))


def too_large(rng: random.Random, websocket: ClientConnection) -> None:
    websocket.send("x" * rng.randrange(MAX_EVENT_BYTES + 1, 3 * MAX_EVENT_BYTES))


def fragments(rng: random.Random, websocket: ClientConnection) -> None:
    text = json.dumps(draw(rng))
    websocket.send(text[at : at + 7] for at in range(0, len(text), 7))


def garbage(rng: random.Random, websocket: ClientConnection) -> None:
    websocket.socket.sendall(rng.randbytes(rng.randrange(1, 300)))


def declared(rng: random.Random, websocket: ClientConnection) -> None:
    """A frame that declares 30 MB and has a few bytes."""
    websocket.socket.sendall(b"\x81\xff" + (30_000_000).to_bytes(8, "big") + bytes(4) + b"x" * rng.randrange(1000))


def barge_in(rng: random.Random, websocket: ClientConnection) -> None:
    """Speak while an answer begins. Either detection finds the turn."""
    detection = rng.choice([SEMANTIC, {"type": "server_vad"}])
    events = (
        {"type": "session.update", "session": {"audio": {"input": {"turn_detection": detection}}}},
        {"type": "conversation.item.create", "item": LONG},
        {"type": "response.create"},
        speech(),
        SILENCE,
    )
    for event in events:
        websocket.send(json.dumps(event))


def half_open(rng: random.Random, websocket: ClientConnection) -> None:
    websocket.socket.shutdown(socket.SHUT_WR)


def reset(rng: random.Random, websocket: ClientConnection) -> None:
    websocket.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


Action = Callable[[random.Random, ClientConnection], None]
ACTIONS: tuple[Action, ...] = (
    *(good, good, good, good, odd, odd, odd, no_json, flood, fragments, barge_in),
    *(binary, too_large, garbage, declared, half_open, reset),
)
ENDS: dict[Action, set[int | None]] = {
    binary: {1003},
    too_large: {1009},
    **{action: {None, *CODES} for action in (garbage, declared, half_open)},
}
"""The close codes with which an action may end the session. None: the connection ends without one."""


def attack(port: int, seed: int, *, leaves_early: bool = False, within_s: float = WATCHDOG_S) -> Counter[str]:
    """One hostile session. It ends with or without a close frame. Return how often it saw each event.

    Args:
        port: of the server.
        seed: of what it does.
        leaves_early: whether it waits for no answer.
        within_s: how long it waits for one.
    """
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    url = f"ws://127.0.0.1:{port}/v1/realtime"
    # A client that broke off in the middle of a frame gets no answer to its close frame, or to a ping.
    # Frames that wait unread would hide the close frame.
    options: Any = {
        "compression": None,
        "max_size": None,
        "max_queue": None,
        "open_timeout": WATCHDOG_S,
        "ping_interval": None,
    }
    with connect(url, close_timeout=0.1, **options) as websocket:
        done: list[Action] = []
        most = rng.randrange(1, 10)
        with suppress(ConnectionClosed, OSError):
            while len(done) < most and half_open not in done:  # a failed write would end our side of reading too
                done.append(rng.choice(ACTIONS))
                done[-1](rng, websocket)
        if not leaves_early:
            check_answer(websocket, done, within_s, seen)
        if rng.random() < 0.5:
            with suppress(OSError):
                websocket.socket.shutdown(socket.SHUT_RDWR)
    assert websocket.protocol.close_rcvd is None or websocket.protocol.close_rcvd.code in CODES
    return seen


def check_answer(websocket: ClientConnection, done: list[Action], within_s: float, seen: Counter[str]) -> None:
    """Fail unless the session ends as these actions have it or, if none of them ends it, a bad event is answered.

    seen: gets the names of the events, and why responses were cancelled.
    """
    give_up = time.monotonic() + within_s
    ends = set[int | None]().union(*(ENDS.get(action, ()) for action in done))
    if None in ends:
        with suppress(OSError):  # the server may wait for the rest of a frame
            websocket.socket.shutdown(socket.SHUT_WR)
    is_answered = False
    try:
        if not ends:
            websocket.send(json.dumps(LAST))
        while not is_answered:
            event = json.loads(websocket.recv(give_up - time.monotonic()))
            check_event(event)
            seen[event["type"]] += 1
            if event["type"] == "response.done" and event["response"]["status"] == "cancelled":
                seen[event["response"]["status_details"]["reason"]] += 1
            is_answered = event["type"] == "error" and event["error"]["event_id"] == LAST["event_id"]
    except TimeoutError as error:
        raise AssertionError(f"no answer in {within_s:g} s") from error
    except ConnectionClosed as closed:
        code = closed.rcvd.code if closed.rcvd else None
        assert code in ends, f"the session ended with {code}"


def run(server: Server, seeds: range) -> None:
    """Run a hostile session for each seed. What the server holds after the first half must not grow in the second."""
    process = psutil.Process(server.process.pid)
    with session(server) as talk:  # loads the model of ``semantic_vad``
        talk.send("session.update", session={"type": "realtime", "audio": {"input": {"turn_detection": SEMANTIC}}})
        for event in (speech(), SILENCE, SILENCE, SILENCE):  # where it finds the sentence unfinished, it waits for 2 s
            talk.websocket.send(json.dumps(event))
        talk.until("response.done")
    half = len(seeds) // 2
    seen = attack_all(server, seeds[:half])
    settled(server)
    descriptors, workers = process.num_fds(), [child.pid for child in process.children()]
    memory = process.memory_full_info().uss
    seen += attack_all(server, seeds[half:])
    settled(server)
    until(lambda: process.num_fds() <= descriptors, f"{descriptors} descriptors")
    assert [child.pid for child in process.children()] == workers
    assert process.memory_full_info().uss - memory < MOST_KEPT + MOST_PER_SESSION * len(seeds[half:])
    assert server.http.get("/health").json()["status"] == "ready"
    assert seen.keys() >= SEEN


def attack_all(server: Server, seeds: range) -> Counter[str]:
    """Run hostile sessions, ``AT_A_TIME``, beside one that must get its answers. Return how often each event came."""
    with session(server) as talk, ThreadPoolExecutor(AT_A_TIME) as pool:
        talk.send("session.update", session={"type": "realtime", "output_modalities": ["text"]})
        talk.until("session.updated")
        attacks = {seed: pool.submit(attack, server.port, seed, leaves_early=seed % 5 == 0) for seed in seeds}
        while not all(each.done() for each in attacks.values()):
            check_conversation(talk)
    seen: Counter[str] = Counter()
    for seed, each in attacks.items():
        try:
            seen += each.result()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    return seen


def check_conversation(talk: Session) -> None:
    """Fail unless a written question and a spoken one are answered."""
    talk.ask("still there")
    written = talk.respond()[-1]["response"]
    for event in (speech(), SILENCE):
        talk.websocket.send(json.dumps(event))
    spoken = talk.until("response.done")[-1]["response"]
    for response, words in ((written, "still there"), (spoken, "24000 Hz")):
        assert response["status"] == "completed"
        assert words in response["output"][0]["content"][0]["text"]


def settled(server: Server) -> None:
    for gauge in ("omni_realtime_sessions", "omni_requests_in_flight", "omni_http_arriving", "omni_unread_bytes"):
        server.wait_metric(gauge, 0)


@contextmanager
def mute_server() -> Iterator[int]:
    """A server of WebSockets, one at a time, that reads all and sends nothing after the handshake. Yield its port."""

    def serve() -> None:
        with suppress(OSError):  # the listener is shut down
            while True:
                client = stack.enter_context(listener.accept()[0])
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += client.recv(1)
                key = head.split(b"Sec-WebSocket-Key: ")[1].split(b"\r\n")[0].decode()
                answer = "HTTP/1.1 101 x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
                client.sendall(f"{answer}{accept_key(key)}\r\n\r\n".encode())
                with suppress(ConnectionResetError):
                    while client.recv(1 << 16):
                        pass

    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_server_that_never_answers_fails() -> None:
    with mute_server() as port:
        for seed in range(20):
            with pytest.raises(AssertionError, match="no answer"):
                attack(port, seed, within_s=0.01)


def test_hostile_sessions_leave_nothing(server: Server) -> None:
    run(server, range(150))


def test_an_event_of_30_mb_ends_the_session(server: Server) -> None:
    with session(server) as talk:
        with suppress(ConnectionClosed):
            talk.send("input_audio_buffer.append", audio="A" * 30_000_000)
        with pytest.raises(ConnectionClosed) as closed:
            talk.receive()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
    settled(server)


@pytest.mark.parametrize(("arguments", "code"), [(COSTLY, "too_many_values"), (DEEP, "nested_too_deeply")])
def test_calls_that_are_dear_to_decode_are_refused(writer: Server, arguments: str, code: str) -> None:
    call = {"type": "function_call", "name": "x", "arguments": arguments}
    with session(writer) as talk:
        error = talk.error("conversation.item.create", item=call)
        assert (error["code"], error["param"]) == (code, "item.arguments")
        error = talk.error("response.create", response={"input": [call]})
        assert (error["code"], error["param"]) == (code, "response.input.arguments")
        talk.ask("still there")


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_many_hostile_sessions_leave_nothing(server: Server) -> None:
    run(server, range(1000, 3000))
