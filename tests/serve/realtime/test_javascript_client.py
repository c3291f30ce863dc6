"""OpenAI's own JavaScript client, unchanged. It always uses TLS, so a proxy with a certificate is before the server.

Needs node and npm; npm installs the client.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.http_server import WATCHDOG_S, Server

PACKAGES = ("openai@6.49.0", "ws@8.23.0")
CERTIFICATE = Path(__file__).parent.parent / "media" / "files.example.org.pem"
PROGRAM = Path(__file__).parent / "client.mjs"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_the_javascript_client_gets_a_spoken_answer(studio: Server, tmp_path: Path) -> None:
    install = ["npm", "install", "--no-audit", "--no-fund", "--silent", *PACKAGES]
    subprocess.run(install, cwd=tmp_path, check=True, timeout=WATCHDOG_S)
    shutil.copy(PROGRAM, tmp_path)
    with tls_in_front_of(studio.port) as port:
        command = ["node", PROGRAM.name, f"https://127.0.0.1:{port}/v1", "none", "studio"]
        environment = {**os.environ, "NODE_TLS_REJECT_UNAUTHORIZED": "0", "NODE_NO_WARNINGS": "1"}
        ran = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=WATCHDOG_S, check=False
        )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {"status": "completed", "transcript": "hello" * 3, "samples": 7200}


@contextmanager
def tls_in_front_of(port: int) -> Iterator[int]:
    """A proxy for one connection, which ends TLS. Yields its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = threading.Thread(target=_relay_one, args=(listener, context, port))
        proxy.start()
        yield listener.getsockname()[1]
        proxy.join(WATCHDOG_S)


def _relay_one(listener: socket.socket, context: ssl.SSLContext, port: int) -> None:
    listener.settimeout(WATCHDOG_S)
    plain, _ = listener.accept()
    with (
        context.wrap_socket(plain, server_side=True) as client,
        socket.create_connection(("127.0.0.1", port)) as server,
    ):
        answers = threading.Thread(target=_copy, args=(server, client))
        answers.start()
        _copy(client, server)
        server.shutdown(socket.SHUT_WR)
        answers.join(WATCHDOG_S)


def _copy(source: socket.socket, target: socket.socket) -> None:
    while data := source.recv(1 << 16):
        target.sendall(data)
