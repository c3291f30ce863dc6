"""Servers as users start them: processes of their own, on a free port, seen only through HTTP, signals and output."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import psutil
import pytest
import soundfile

from tests.support.http_server import WATCHDOG_S, Api, Server, Start

HERE = Path(__file__).parent
STUDIO = """\
name: studio
stages:
  ear: {engine: "tests.support.served_engines:Ear", accepts: [audio], emits: transcript}
  mind: {engine: echo, accepts: [messages], inputs: [ear], emits: text, options: {fan_out: 3}}
  mouth: {engine: "tests.support.served_engines:Speaker", accepts: [script], inputs: [mind], emits: audio}
"""

GALLERY = """\
name: gallery
stages:
  eye: {engine: "tests.support.served_engines:Eye", accepts: [audio, image, messages, video], emits: text}
"""
"""A pipeline for media, in the shape of an omni model."""


@pytest.fixture(scope="session")
def command() -> Callable[..., subprocess.Popen[bytes]]:
    """Start ``python -m omni_actors.serve`` with arguments. Its workers can import the engines of these tests.

    files: how many descriptors it may have. module: run this one instead.
    """

    def start(
        *arguments: str, stdout: Any, stderr: Any, files: int | None = None, module: str = "omni_actors.serve"
    ) -> subprocess.Popen[bytes]:
        root = HERE.parent.parent
        path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", module, *arguments]
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
        module: str = "omni_actors.serve",
    ) -> Iterator[Server]:
        folder = tmp_path_factory.mktemp("server")
        if "\n" in config:
            (folder / "pipeline.yaml").write_text(config)
            config = str(folder / "pipeline.yaml")
        if api_key:
            arguments = (*arguments, "--api-key", api_key)
        stdout, stderr = folder / "stdout", folder / "stderr"
        with stdout.open("wb") as out, stderr.open("wb") as err:
            process = command(config, "--port", "0", *arguments, stdout=out, stderr=err, files=files, module=module)
        try:
            server = Server(process=process, stdout=stdout, stderr=stderr, api_key=api_key, wait_ended=wait_ended)
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
    """A pipeline without models in the shape of "voice": it returns its input as text and sound."""
    with start("--max-body-bytes", "1000000") as server:
        yield server
        assert server.stderr == ""


class Gallery(NamedTuple):
    """A server whose pipeline reports its input. It may read one folder and, by name, fetch from one site.

    The site is on this machine, which the server refuses to contact otherwise.
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
    """A server with an API key that needs a quarter of an hour for an answer and admits two requests."""
    mind = ("-s", "stages.mind.options.fan_out=100000", "-s", "stages.mind.options.step_s=0.01")
    mouth = ("-s", "stages.mouth.options.step_s=0.01")
    limits = ("-s", "limits.max_requests=2")
    with start(*mind, *mouth, *limits, api_key="sesame") as server:
        yield server
        assert server.stderr == ""


@pytest.fixture(scope="session")
def writer_config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny language model with random weights, whose chat template knows tools."""
    from tests.stages.llm.test_tools import with_tools  # loads torch, which most tests of the server do without

    model: Path = with_tools(tmp_path_factory.mktemp("writer"))
    return f"""\
name: writer
stages:
  mind: {{engine: llm, model: "{model}", accepts: [messages], emits: text, threads: 1, options: {{context: 512}}}}
"""


@pytest.fixture(scope="session")
def writer(start: Start, writer_config: str) -> Iterator[Server]:
    with start(config=writer_config) as server:
        yield server


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
