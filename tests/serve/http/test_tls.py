"""TLS: real clients over https, certificates that change, clients that must have one, and bytes that are not TLS."""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trio
import trio.testing
from click.testing import CliRunner

from omni_actors.cli import main
from omni_actors.serve.command import serve_command
from omni_actors.serve.http import connection
from omni_actors.serve.http.tls_socket import TLSSocket
from tests.support.http_listener import GET, listening, read_all
from tests.support.http_server import WATCHDOG_S, Server, Start

FILES = Path(__file__).parent / "certificates"
"""Made with: openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 36500 -addext
"subjectAltName=DNS:localhost,IP:127.0.0.1" …; each has signed itself. The password of ``encrypted.key`` is "sesame"."""
MIND = """\
name: studio
stages:
  mind: {engine: echo, accepts: [messages], emits: text, options: {fan_out: 20}}
  mouth: {engine: "tests.support.served_engines:Speaker", accepts: [script], emits: audio}
"""
HELLO: Any = [{"role": "user", "content": "hello "}]


HALF_A_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 100
LONG_RECORD = b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03"
"""The beginning of a handshake record of 16 KiB."""


def trusting(*names: str, client: str | None = None) -> ssl.SSLContext:
    """The context of a client that trusts these certificates, and has the certificate ``client``."""
    context = ssl.create_default_context()
    for name in names:
        context.load_verify_locations(FILES / name)
    if client is not None:
        context.load_cert_chain(FILES / client)
    return context


def client_of(server: Server, context: ssl.SSLContext) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(verify=context)
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=WATCHDOG_S, http_client=http
    )


def connect(server: Server, context: ssl.SSLContext) -> ssl.SSLSocket:
    sock = socket.create_connection(("127.0.0.1", server.port), WATCHDOG_S)
    return context.wrap_socket(sock, server_hostname="127.0.0.1")


@pytest.fixture(scope="module")
def secure(start: Start) -> Iterator[Server]:
    """With an encrypted key in a file of its own."""
    files = ("--ssl-certfile", str(FILES / "server_only.pem"), "--ssl-keyfile", str(FILES / "encrypted.key"))
    with start(*files, "--ssl-keyfile-password", "sesame", config=MIND) as server:
        assert server.url.startswith("https://127.0.0.1:")
        yield server
        assert server.stderr == ""


def test_openais_client_over_https(secure: Server) -> None:
    with client_of(secure, trusting("server.pem")) as client:
        assert [model.id for model in client.models.list()] == ["studio"]
        stream = client.chat.completions.create(model="studio", messages=HELLO, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "hello " * 20
        speech = client.audio.speech.create(model="studio", voice="any", input="one two three", response_format="pcm")
        assert len(speech.content) > 2 * 3 * 1600


@pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager:DeprecationWarning")
def test_openais_realtime_client_over_https(secure: Server) -> None:
    context = trusting("server.pem")
    with client_of(secure, context) as client:
        options: Any = {"ssl": context}
        with client.realtime.connect(model="studio", websocket_connection_options=options) as session:
            assert session.recv().type == "session.created"


def test_a_command_says_why_it_refuses_a_certificate_and_what_trusts_it(secure: Server) -> None:
    def chat(url: str, certificates: str | None) -> tuple[int, str]:
        arguments, environment = ["chat", "--url", url], {"SSL_CERT_FILE": certificates}
        result = CliRunner().invoke(main, arguments, input="hello\n", env=environment)
        return result.exit_code, " ".join(result.stderr.split())

    trusted = str(FILES / "server.pem")
    code, words = chat(secure.url, None)
    assert code == 1
    assert "certificate verify failed: self-signed certificate; SSL_CERT_FILE=FILE trusts it" in words
    assert chat(secure.url, trusted) == (0, "")
    code, words = chat(secure.url.replace("127.0.0.1", "127.1"), trusted)
    assert (code, words.endswith("certificate is not valid for '127.1'.")) == (1, True), words
    for file in ("/nowhere.pem", __file__):
        code, words = chat(secure.url, file)
        assert (code, f"({file})" in words) == (2, True), words


def test_a_body_of_many_records_arrives_whole(secure: Server) -> None:
    text = "word " * 100_000
    with httpx.Client(base_url=secure.url, verify=trusting("server.pem"), timeout=WATCHDOG_S) as http:
        body = {"model": "studio", "messages": [{"role": "user", "content": text}]}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == text * 20


def test_the_end_of_a_connection_is_announced(secure: Server) -> None:
    with connect(secure, trusting("server.pem")) as client:
        client.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b""
        while piece := client.recv(4096):  # it would raise SSLEOFError
            answer += piece
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert client.version() == "TLSv1.3"


def test_a_stranger_that_speaks_no_tls_disturbs_nothing(secure: Server) -> None:
    for data in (b"\x00" * 100, b"\x16\x03\x01\xff\xff" + b"x" * 20_000):
        with socket.create_connection(("127.0.0.1", secure.port), WATCHDOG_S) as client:
            client.sendall(data)
            try:
                while client.recv(4096):
                    pass
            except ConnectionResetError:
                pass
    with client_of(secure, trusting("server.pem")) as client:
        assert client.models.list().data


def server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(FILES / "server.pem")
    return context


@pytest.mark.parametrize("head", ["GET /ping HTTP/1.1", "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 9999"])
def test_http_without_tls_is_told_to_use_https(secure: Server, head: str) -> None:
    with socket.create_connection(("127.0.0.1", secure.port), WATCHDOG_S) as sock, sock.makefile("rb") as answer:
        sock.sendall(f"{head}\r\nHost: x\r\n\r\n".encode())
        lines = answer.read().split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 400 Bad Request"
    assert b"https://" in lines[-1]
    with client_of(secure, trusting("server.pem")) as client:
        assert len(client.models.list().data) == 1


async def test_slow_bytes_do_not_extend_the_time_for_a_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.5)
    async with (
        listening(tls=server_context()) as server,
        await server.connect() as stream,
        trio.open_nursery() as nursery,
    ):

        async def drip() -> None:
            """Send a record that never ends: its head claims more bytes than arrive before the watchdog."""
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(LONG_RECORD)
                while True:
                    await stream.send_all(b"x")
                    await trio.sleep(0.02)

        nursery.start_soon(drip)
        with contextlib.suppress(trio.BrokenResourceError):  # a reset, as it is still sending
            assert await read_all(stream) == b""
        nursery.cancel_scope.cancel()


async def test_a_client_that_does_not_read_is_heard() -> None:
    """Both directions at once. The server's output is congested while the client sends."""
    message = b"x" * 1_000_000
    with trio.fail_after(WATCHDOG_S), socket.create_server(("127.0.0.1", 0)) as listener:
        raw = await trio.open_tcp_stream(*listener.getsockname())
        accepted = trio.socket.from_stdlib_socket(listener.accept()[0])
        server = TLSSocket(accepted, server_context())
        client = trio.SSLStream(raw, trusting("server.pem"), server_hostname="127.0.0.1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.do_handshake)
            await server.handshake()

        async def flood() -> None:
            while True:
                await server.send(message)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(client.send_all, message)
            while len(server.buffer) < len(message):
                assert await server.fill()
            nursery.cancel_scope.cancel()
        server.close()
        await trio.aclose_forcefully(client)


async def test_half_a_handshake_keeps_no_client_out() -> None:
    """At the limit of an address, the oldest of them is closed."""
    async with listening(tls=server_context()) as server:
        half = [await server.connect() for _ in range(3)]
        for each in half:
            await each.send_all(HALF_A_HELLO[:50])
        await trio.testing.wait_all_tasks_blocked()
        raw = await server.connect()
        stream = trio.SSLStream(raw, trusting("server.pem"), server_hostname="127.0.0.1")
        await stream.send_all(GET)
        assert (await stream.receive_some(4096)).startswith(b"HTTP/1.1 200 ")
        assert await read_all(half[0]) == b""
        for each in (*half, stream):
            await trio.aclose_forcefully(each)


def test_an_untrusting_client_refuses_the_server(secure: Server) -> None:
    with client_of(secure, trusting("renewed.pem")) as client, pytest.raises(openai.APIConnectionError):
        client.models.list()


def test_a_client_needs_a_certificate_if_the_server_asks_for_one(start: Start) -> None:
    files = ("--ssl-certfile", str(FILES / "server.pem"), "--ssl-ca-certs", str(FILES / "client.pem"))
    with start(*files, config=MIND) as server:
        with client_of(server, trusting("server.pem", client="client.pem")) as client:
            assert client.models.list().data
        for other in (None, "renewed.pem"):
            refused = trusting("server.pem", client=other)
            with client_of(server, refused) as client, pytest.raises(openai.APIConnectionError):
                client.models.list()


def test_a_hangup_loads_the_certificate_again(start: Start, tmp_path: Path) -> None:
    """An open connection goes on. A file that is wrong changes nothing."""
    file = tmp_path / "certificate.pem"
    file.write_bytes((FILES / "server.pem").read_bytes())
    with start("--ssl-certfile", str(file), config=MIND) as server, connect(server, trusting("server.pem")) as before:
        file.write_bytes((FILES / "renewed.pem").read_bytes())
        server.signal(signal.SIGHUP)
        server.wait(lambda: "the certificate was loaded again" in server.stderr, "the certificate to be loaded")
        with client_of(server, trusting("renewed.pem")) as client:
            assert client.models.list().data
        file.write_text("nonsense")
        server.signal(signal.SIGHUP)
        server.wait(lambda: "was not loaded again" in server.stderr, "the failure to be logged")
        with client_of(server, trusting("renewed.pem")) as client:
            assert client.models.list().data
        file.unlink()
        file.symlink_to("x" * 300)  # the kernel refuses such a name, as it does a directory that may not be searched
        server.signal(signal.SIGHUP)
        server.wait(lambda: server.stderr.count("was not loaded again") == 2, "the second failure to be logged")
        before.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        assert before.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert server.ends_by(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ssl-certfile", "/nowhere.pem"], "/nowhere.pem"),
        (["--ssl-certfile", __file__], "a PEM file with a certificate"),
        (["--ssl-certfile", str(FILES / "server_only.pem")], "a PEM file with a certificate"),
        (
            ["--ssl-certfile", str(FILES / "server_only.pem"), "--ssl-keyfile", str(FILES / "encrypted.key")],
            "a PEM file with a certificate",
        ),
        (["--ssl-certfile", str(FILES / "server.pem"), "--ssl-ca-certs", __file__], "a PEM file with certificates"),
        (["--ssl-keyfile", str(FILES / "encrypted.key")], "--ssl-certfile"),
    ],
)
def test_files_that_make_no_tls_are_a_bad_configuration(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(serve_command, ["echo", "--port", "0", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
