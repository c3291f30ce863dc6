"""Servers as users start them: processes of their own, on a free port, seen only through HTTP, signals and output."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import openai
import psutil
import pytest
import soundfile

HERE = Path(__file__).parent
WATCHDOG_S = 60.0
"""No wait in these tests comes near it."""

STUDIO = """\
name: studio
stages:
  ear: {engine: "engines:Ear", accepts: [audio], emits: transcript}
  mind: {engine: echo, accepts: [messages], inputs: [ear], emits: text, options: {fan_out: 3}}
  mouth: {engine: "engines:Speaker", accepts: [script], inputs: [mind], emits: audio}
"""

GALLERY = """\
name: gallery
stages:
  eye: {engine: "engines:Eye", accepts: [audio, image, messages, video], emits: text}
"""
"""What sees, in the shape of an omni model."""


class Api:
    """A server that is there, as its clients see it."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url, self._key = url, api_key
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = httpx.Client(base_url=url, timeout=WATCHDOG_S, headers=headers)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def openai(self, api_key: str | None = None) -> openai.OpenAI:
        """A client without retries, so that a test sees the first answer. To be closed."""
        key = api_key or self._key or "none"
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=WATCHDOG_S)

    def metric(self, sample: str) -> float:
        """A sample by its name and labels, as it stands in the exposition; 0 where it is not there."""
        lines = self.http.get("/metrics").text.splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{sample} ")), 0.0)

    def aborted(self) -> float:
        return self.metric('omni_requests_total{outcome="Aborted"}')

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        until(condition, what)

    def wait_metric(self, sample: str, value: float) -> None:
        until(lambda: self.metric(sample) == value, f"{sample} to become {value}")

    def status(self) -> str:
        """What /health says in a word."""
        status: str = self.http.get("/health").json()["status"]
        return status

    def pid_of(self, stage: str) -> int:
        pid: int = self.http.get("/health").json()["stages"][stage][0]["pid"]
        return pid


class Server(Api):
    """With its process. Its output goes to files, so that it never waits for this process to read."""

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
    def stderr(self) -> str:
        return self._stderr.read_text()

    def wait_ready(self) -> None:
        self._announced("ready: ")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_end(self) -> int:
        return self.process.wait(WATCHDOG_S)

    def ends_by(self, number: signal.Signals) -> tuple[int, str]:
        """Send it a signal: its exit code, and what it has said on stderr. None of its processes is left."""
        workers = psutil.Process(self.process.pid).children(recursive=True)
        assert workers
        self.signal(number)
        code = self.wait_end()
        self._wait_ended(workers)
        return code, self.stderr

    def wait_refusing(self) -> None:
        """Until it takes no connections. One that meets the listener as it closes is reset: not refused yet."""

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
            has_ended = self.process.poll() is not None  # before the look at what it said
            found[:] = [line for line in self._stdout.read_text().splitlines(keepends=True) if line.startswith(start)]
            return bool(found and found[0].endswith("\n")) or has_ended

        until(look, f"the line {start!r}")
        assert found, f"the server ended with {self.process.returncode}: {self.stderr}"
        return found[0].removeprefix(start).strip()


def until(condition: Callable[[], bool], what: str) -> None:
    """Look until it holds, or the watchdog barks."""
    give_up = time.monotonic() + WATCHDOG_S
    while not condition():
        assert time.monotonic() < give_up, f"waited {WATCHDOG_S:.0f} s for {what}"
        time.sleep(0.01)


Start = Callable[..., AbstractContextManager[Server]]


@pytest.fixture(scope="session")
def command() -> Callable[..., subprocess.Popen[bytes]]:
    """Start ``python -m omni_actors.serve`` with arguments. Its workers can import the engines of these tests.

    files: how many descriptors it may have.
    """

    def start(*arguments: str, stdout: Any, stderr: Any, files: int | None = None) -> subprocess.Popen[bytes]:
        root = HERE.parent.parent
        path = os.pathsep.join([str(root), str(HERE), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "omni_actors.serve", *arguments]
        if files is not None:
            command = ["sh", "-c", 'ulimit -n "$0" && exec "$@"', str(files), *command]
        return subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment, cwd=root)

    return start


@pytest.fixture(scope="session")
def start(
    command: Callable[..., subprocess.Popen[bytes]],
    tmp_path_factory: pytest.TempPathFactory,
    wait_ended: Callable[[Iterable[psutil.Process]], None],
) -> Callable[..., AbstractContextManager[Server]]:
    """A server for as long as the block lasts. config: a name or a document. ready: wait for its stages."""

    @contextmanager
    def open_server(
        *arguments: str,
        config: str = STUDIO,
        api_key: str | None = None,
        ready: bool = True,
        files: int | None = None,
    ) -> Iterator[Server]:
        folder = tmp_path_factory.mktemp("server")
        if "\n" in config:
            (folder / "pipeline.yaml").write_text(config)
            config = str(folder / "pipeline.yaml")
        if api_key:
            arguments = (*arguments, "--api-key", api_key)
        stdout, stderr = folder / "stdout", folder / "stderr"
        with stdout.open("wb") as out, stderr.open("wb") as err:
            process = command(config, "--port", "0", *arguments, stdout=out, stderr=err, files=files)
        try:
            server = Server(process, stdout, stderr, api_key, wait_ended)
            with server.http:
                if ready:
                    server.wait_ready()
                yield server
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            process.wait(WATCHDOG_S)

    return open_server


@pytest.fixture(scope="session")
def studio(start: Start) -> Iterator[Server]:
    """A pipeline without models in the shape of "voice": what it hears and reads comes back, in text and sound."""
    with start("--max-body-bytes", "1000000") as server:
        yield server
        assert server.stderr == ""


class Gallery(NamedTuple):
    """A pipeline that tells what it was shown, behind a server that may read one folder and, by its name, ask one site.

    That is on this machine, where no server of ours must go.
    """

    server: Server
    folder: Path
    site: socket.socket


@pytest.fixture(scope="session")
def gallery(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gallery]:
    folder = tmp_path_factory.mktemp("gallery")
    with socket.create_server(("127.0.0.1", 0)) as site:
        domain = f"localhost:{site.getsockname()[1]}"
        with start("--allow-media-dir", str(folder), "--allow-media-domain", domain, config=GALLERY) as server:
            yield Gallery(server, folder, site)
            assert server.stderr == ""


@pytest.fixture(scope="session")
def voice(voice_url: str) -> Iterator[Api]:
    """The real pipeline."""
    api = Api(voice_url)
    with api.http:
        yield api


@pytest.fixture(scope="session")
def slow(start: Start) -> Iterator[Server]:
    """Takes a quarter of an hour for an answer; two at once; asks for a key."""
    mind = ("-s", "stages.mind.options.fan_out=100000", "-s", "stages.mind.options.step_s=0.01")
    mouth = ("-s", "stages.mouth.options.step_s=0.01")
    limits = ("-s", "limits.max_requests=2")
    with start(*mind, *mouth, *limits, api_key="sesame") as server:
        yield server
        assert server.stderr == ""


@pytest.fixture
def client(studio: Server) -> Iterator[openai.OpenAI]:
    with studio.openai() as client:
        yield client


@pytest.fixture(scope="session")
def recording() -> Callable[..., bytes]:
    """An audio file: ``seconds`` of a 440 Hz tone."""

    def record(seconds: float = 1.0, rate: int = 16000, format: str = "WAV", channels: int = 1) -> bytes:
        tone = 0.3 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)
        file = io.BytesIO()
        soundfile.write(file, np.repeat(tone[:, None], channels, axis=1), rate, format=format)
        return file.getvalue()

    return record


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]
