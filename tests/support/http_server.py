"""A server as users start it: a process, seen only through HTTP, signals and its output."""

from __future__ import annotations

import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import psutil

WATCHDOG_S = 100.0
"""The limit of every wait; a test that reaches it has failed."""
STALLED_WORDS = 1365
"""4,096 characters. A word is 1600 samples: 6.4 kB in the system, and 3.2 kB sent."""
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""A context without certificates, for clients of http:// URLs. Without it, each client reads the certificates."""


class Api:
    """A running server, as its clients see it."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url, self._key = url, api_key
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = httpx.Client(base_url=url, timeout=WATCHDOG_S, headers=headers, verify=NO_TLS)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def openai(self, api_key: str | None = None) -> openai.OpenAI:
        """A client without retries, so that a test sees the first answer. To be closed."""
        key = api_key or self._key or "none"
        http = openai.DefaultHttpxClient(verify=NO_TLS)
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=WATCHDOG_S, http_client=http
        )

    def metric(self, sample: str) -> float:
        """Return a sample of /metrics by its name and labels; 0 if it is missing."""
        lines = self.http.get("/metrics").text.splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{sample} ")), 0.0)

    def aborted(self) -> float:
        return self.metric('omni_requests_total{outcome="Aborted"}')

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        until(condition, what)

    def wait_metric(self, sample: str, value: float) -> None:
        until(lambda: self.metric(sample) == value, f"{sample} to become {value}")

    def status(self) -> str:
        """Return the status of /health."""
        status: str = self.http.get("/health").json()["status"]
        return status

    def replica(self, stage: str) -> dict[str, Any]:
        """Return what /health says of the first replica of a stage."""
        found: dict[str, Any] = self.http.get("/health").json()["stages"][stage][0]
        return found

    def pid_of(self, stage: str) -> int:
        pid = self.replica(stage)["pid"]
        assert isinstance(pid, int)
        return pid


class Server(Api):
    """A server with its process. Its output goes to files, so that it never waits for a reader."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stdout: Path,
        stderr: Path,
        api_key: str | None,
        wait_ended: Callable[[Iterable[psutil.Process]], None],
    ) -> None:
        self.process, self._stdout, self._stderr, self._wait_ended = process, stdout, stderr, wait_ended
        super().__init__(self._announced("listening on ").split(";")[0], api_key)

    @property
    def stdout(self) -> str:
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def wait_ready(self) -> None:
        self._announced("ready: ")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_end(self) -> int:
        return self.process.wait(WATCHDOG_S)

    def ends_by(self, number: signal.Signals) -> tuple[int, str]:
        """Send a signal; return the exit code and stderr. All of the server's processes have then exited."""
        workers = psutil.Process(self.process.pid).children(recursive=True)
        assert workers
        self.signal(number)
        code = self.wait_end()
        self._wait_ended(workers)
        return code, self.stderr

    def wait_refusing(self) -> None:
        """Wait until the port refuses connections. A connection during the close is reset, which does not count."""

        def refused() -> bool:
            try:
                socket.create_connection(("127.0.0.1", self.port), WATCHDOG_S).close()
            except ConnectionRefusedError:
                return True
            except ConnectionResetError:
                pass
            return False

        until(refused, f"port {self.port} to be closed")

    def _announced(self, start: str) -> str:
        found: list[str] = []

        def look() -> bool:
            has_ended = self.process.poll() is not None  # before its output is read
            found[:] = [line for line in self._stdout.read_text().splitlines(keepends=True) if line.startswith(start)]
            return bool(found and found[0].endswith("\n")) or has_ended

        until(look, f"the line {start!r}")
        assert found, f"the server ended with {self.process.returncode}: {self.stderr}"
        return found[0].removeprefix(start).strip()


def until(condition: Callable[[], bool], what: str) -> None:
    """Poll until the condition holds; fail after ``WATCHDOG_S``."""
    give_up = time.monotonic() + WATCHDOG_S
    while not condition():
        assert time.monotonic() < give_up, f"waited {WATCHDOG_S:.0f} s for {what}"
        time.sleep(0.01)


def stalled(server: Server) -> socket.socket:
    """Return a client that has asked for a long speech and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(WATCHDOG_S)
    client.connect(("127.0.0.1", server.port))
    speech = {"model": "studio", "voice": "alloy", "input": "la " * STALLED_WORDS, "response_format": "wav"}
    body = msgspec.json.encode(speech)
    head = "POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return client


Start = Callable[..., AbstractContextManager[Server]]


def process_with_a_bug(*arguments: str) -> subprocess.Popen[bytes]:
    """Start a server that ends by an exception as soon as it listens. arguments: more ones of its command."""
    program = """if True:
        import sys
        from omni_actors.serve import server
        from omni_actors.serve.command import serve_command

        async def run(self, *arguments):
            raise ZeroDivisionError("a bug")

        server.HTTPListener.run = run
        serve_command(["echo", "--port", "0", *sys.argv[1:]])
    """
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
