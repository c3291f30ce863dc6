"""A fuzzer of the protocol: odd and malformed HTTP on raw sockets, against one real server.

Rules
1. However odd a connection is, the server answers the next normal request, and it closes its side once the client has
   ended its own. An error has OpenAI's error object as its body, and none is the server's own fault (5xx, but for those
   for what the server does not support).
2. Memory and descriptors are flat at the end.

`make test` runs some hundred cases, `make test-perf` 5,000 others, and
``OMNI_ACTORS_FUZZ_CASES=200000 OMNI_ACTORS_FUZZ_SEED=3 pytest tests/serve/http/test_protocol_fuzzing.py -m slow``
runs 200,000.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("OMNI_ACTORS_FUZZ_CASES", "5000"))
SEED = int(os.environ.get("OMNI_ACTORS_FUZZ_SEED", "2"))
FEW_CASES, FEW_SEED = 750, 1
BATCH = 25
"""Cases at a time, each on a connection of its own."""
WATCHDOG_S = 60
MARGIN_BYTES = 24 * 1024 * 1024

METHODS = [
    b"GET",
    b"POST",
    b"POST",
    b"HEAD",
    b"PUT",
    b"OPTIONS",
    b"CONNECT",
    b"TRACE",
    b"PRI",
    b"get",
    b"G\xc9T",
    b"",
    b"M" * 300,
]
TARGETS = [
    *(b"/health", b"/v1/models", b"/v1/models/%ff", b"/v1/chat/completions", b"/v1/audio/speech", b"/metrics"),
    *(b"/v1/audio/transcriptions", b"/", b"//", b"*", b"", b"/\xc3\xa9", b"/%c3%a9%00", b"/a b", b"/?" + b"q" * 2000),
    *(b"http://[/health", b"http://x/health", b"x:443", b"/" + b"../" * 300, b"/%", b"/\0"),
]
VERSIONS = [b"HTTP/1.1"] * 6 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.2", b"http/1.1", b"", b"HTTP/11"]
HEADERS = [
    name + b": " + value
    for name, values in {
        b"Content-Length": [b"0", b"5", b"-1", b"+5", b"5, 5", b"5, 6", b"0x5", b"9" * 20, b"9" * 30],
        b"Transfer-Encoding": [b"chunked", b"Chunked", b"gzip, chunked", b"\x0bchunked", b"identity"],
        b"Expect": [b"100-continue", b"100-CONTINUE", b"200-ok", b""],
        b"Connection": [b"close", b"keep-alive", b"Upgrade", b"Upgrade, HTTP2-Settings", b",,"],
        b"Upgrade": [b"h2c", b"websocket", b"h2c, websocket", b"\xff"],
        b"HTTP2-Settings": [b"AAMAAABkAAQAAP__", b"AAMAAABk", b"\xff?", b"", b"!"],
        b"Sec-WebSocket-Key": [b"x"],
        b"Sec-WebSocket-Protocol": [b"caf\xe9"],
        b"Sec-WebSocket-Extensions": [b";;="],
        b"Host": [b"x", b"[", b"\xff", b"", b"x:99999999"],
        b"Content-Type": [b"application/json", b"multipart/form-data", b"multipart/form-data; boundary=b", b"\xff"],
        b"Authorization": [b"Bearer x", b"Bearer \xff", b"Basic", b""],
        b"X": [b"\0", b" \t" * 2000 + b"\x0c", b"y" * 9000],
        b"X ": [b"y"],
        b"": [b"x"],
        b" folded": [b"x"],
        b"\xc3\xa9": [b"x"],
    }.items()
    for value in values
]
FRAMES = [
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\0\0\0\4\0\0\0\0\0",
    b"\0\0\5\2\0\0\0\0\1\0\0\0\0\0" * 40,
    b"\0\0\4\x03\0\0\0\0\1\0\0\0\1",
    b"\x81\x85\1\2\3\4hello",
    b"\x16\x03\x01\0\xa5\1\0\0\xa1",
]
CHUNKS = [
    *(
        b"5\r\nhello\r\n",
        b"1;x=y\r\na\r\n",
        b"0005\r\nhello\r\n",
        b"2;" + b"e" * 1500 + b"\r\nab\r\n",
        b"1 \t\r\na\r\n",
    ),
    *(b"5\r\nhelloX\r\n", b"5\nhello\n", b"g\r\n", b"-1\r\n", b"\r\n", b"1" + b"0" * 20, b"f" * 20 + b"\r\n"),
    *(b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nT: x\r\n\r\n", b"0\r\nbad\r\n\r\n"),
    *(b"0\r\nT:" + b" " * 3000 + b"\x0b\r\n\r\n", b"0\r\n" + b"a: b\r\n" * 400 + b"\r\n"),
]
FORMS = [b"--b", b"--b--", b"\r\n", b'Content-Disposition: form-data; name="file"; filename="a"', b"\r\n\r\n", b"RIFF"]
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    2**63,
    1e308,
    0.5,
    "",
    "studio",
    "é\ud7ff",
    "x" * 500,
    [],
    {},
    [[]],
    {"a": 1},
    ["text"],
]
FIELDS = [
    *("model", "messages", "input", "stream", "modalities", "audio", "stop", "max_tokens", "temperature", "voice"),
    *("response_format", "tools", "n", "seed", "user", "stream_options", "é", "", "request_id", "self"),
]
JSON_ODDS = [
    b"",
    b"{",
    b"nul",
    b"[]",
    b'"',
    b'{"a":1e999}',
    b'{"a":"\\ud800"}',
    b"\xef\xbb\xbf{}",
    b"\xff\xfe",
    b"[" * 200,
    b"{}{}",
    b"NaN",
]
GOOD = {"model": "studio", "messages": [{"role": "user", "content": "hello"}], "input": "hello"}


class Case(NamedTuple):
    """The pieces that a client sends, and how it ends the connection: half-close, close or reset."""

    pieces: list[bytes]
    ending: str


def line(method: bytes, target: bytes, version: bytes) -> bytes:
    return b" ".join((method, target, version))


ONE_OF_3 = st.sampled_from([False, False, True])
ONE_OF_9 = st.sampled_from([False] * 8 + [True])
ODD_LINES = st.builds(line, st.sampled_from(METHODS), st.sampled_from(TARGETS), st.sampled_from(VERSIONS))
LINES = st.sampled_from(
    [
        b"GET /health HTTP/1.1",
        b"GET /v1/models HTTP/1.0",
        b"HEAD /v1/models HTTP/1.1",
        b"POST /v1/chat/completions HTTP/1.1",
        b"POST /v1/audio/speech HTTP/1.1",
        b"POST /v1/audio/transcriptions HTTP/1.1",
    ]
)
BODIES = st.one_of(
    st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(VALUES), max_size=3).map(
        lambda odd: json.dumps({**GOOD, **odd}).encode("utf-8", "surrogatepass")
    ),
    st.sampled_from(JSON_ODDS),
    st.lists(st.sampled_from(FORMS)).map(b"".join),
    st.binary(max_size=60),
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A head, and a body that may or may not match it."""
    headers = draw(st.lists(st.sampled_from(HEADERS), max_size=2)) if draw(ONE_OF_3) else []
    if not draw(ONE_OF_9):
        headers.append(b"Host: x")
    match draw(st.sampled_from(["none", "length", "length", "chunks", "frames"])):
        case "length":
            body = draw(BODIES)
            headers.append(b"Content-Length: %d" % len(body))
        case "chunks":
            headers.append(b"Transfer-Encoding: chunked")
            body = b"".join(draw(st.lists(st.sampled_from(CHUNKS), max_size=4)))
        case "frames":
            body = draw(st.sampled_from(FRAMES))
        case _:
            body = b""
    first = draw(ODD_LINES if draw(ONE_OF_3) else LINES)
    return b"\r\n".join([first, *headers, b"", b""]) + body


@st.composite
def cases(draw: st.DrawFn) -> Case:
    data = draw(st.one_of(st.sampled_from(FRAMES), st.binary(max_size=40)) if draw(ONE_OF_9) else requests())
    if draw(ONE_OF_3):
        data += draw(requests())
    match draw(st.integers(0, 8)):
        case 0:  # a byte is another
            at = draw(st.integers(0, len(data)))
            data = data[:at] + draw(st.binary(min_size=1, max_size=1)) + data[at + 1 :]
        case 1:  # it stops early
            data = data[: draw(st.integers(0, len(data)))]
        case 2:
            data = data.replace(b"\r\n", b"\n")
    split = draw(st.sampled_from([0, 0, 1, 2]))
    pieces = [data]
    if split == 1:
        at = draw(st.integers(0, len(data)))
        pieces = [data[:at], data[at:]]
    elif split == 2 and len(data) < 300:
        pieces = [bytes([byte]) for byte in data]
    return Case(pieces, draw(st.sampled_from(["half", "half", "half", "close", "reset"])))


def connect(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), WATCHDOG_S)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def begin(client: socket.socket, case: Case) -> None:
    with contextlib.suppress(OSError):  # it may be refused, and reset, before it has sent all
        for piece in case.pieces:
            client.sendall(piece)
        if case.ending == "half":
            client.shutdown(socket.SHUT_WR)
    if case.ending == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def end(client: socket.socket, case: Case) -> bytes:
    """Return all that the server sends, if the client reads."""
    received = b""
    with client, contextlib.suppress(ConnectionError):
        while case.ending == "half" and (data := client.recv(65536)):
            received += data
    return received


def require_sound(received: bytes) -> None:
    """Check rule 1, on the last response, which is the error if there is one."""
    assert not received or received.startswith(b"HTTP/1.1 "), received
    for status in (b"500", b"502", b"503", b"504"):
        assert b"HTTP/1.1 " + status not in received, received
    head, _, body = received[received.rfind(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    if head[9:10] in b"45" and head and b"content-length: 0" in head:
        raise AssertionError(received)
    if head[9:10] == b"4" and body:  # HEAD has none
        assert set(json.loads(body)) == {"error"}


@pytest.mark.timeout(120 + CASES // 50)
@pytest.mark.parametrize(
    ("count", "chosen_by"),
    [
        pytest.param(FEW_CASES, FEW_SEED, id="few"),
        pytest.param(CASES, SEED, id="many", marks=pytest.mark.slow),
    ],
)
def test_no_packet_harms_the_server(start: Any, count: int, chosen_by: int) -> None:
    with start("--max-body-bytes", "1000000") as server:
        process = psutil.Process(server.process.pid)
        server.http.get("/health")
        descriptors, memory, done = process.num_fds(), [0], [0]

        def batch(batch: list[Case]) -> None:
            with contextlib.ExitStack() as opened:
                clients = [opened.enter_context(connect(server.port)) for _ in batch]
                for client, case in zip(clients, batch, strict=True):
                    begin(client, case)
                for client, case in zip(clients, batch, strict=True):
                    require_sound(end(client, case))
            answer: httpx.Response = server.http.post("/v1/chat/completions", json=GOOD | {"input": None})
            assert answer.status_code == 200, answer.text
            done[0] += len(batch)
            if not memory[0] and done[0] >= count // 5:  # caches and the allocator's arenas are filled
                memory[0] = process.memory_info().rss

        fuzz = given(st.lists(cases(), min_size=BATCH, max_size=BATCH))(batch)
        options = settings(
            max_examples=-(-count // BATCH),
            phases=[Phase.generate, Phase.shrink],
            database=None,
            deadline=None,
            derandomize=False,
            suppress_health_check=list(HealthCheck),
        )
        seed(chosen_by)(options(fuzz))()
        assert done[0] >= count
        assert process.memory_info().rss < memory[0] + MARGIN_BYTES
        server.wait(lambda: process.num_fds() <= descriptors, "the connections to be closed")
        assert "Traceback" not in server.stderr
