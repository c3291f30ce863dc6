"""OpenAI's own JavaScript client, unchanged. It always uses TLS. Needs node and npm; npm installs the client."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

from bench.turns import converse, say
from tests.support.http_server import WATCHDOG_S, Server, Start
from tests.support.realtime import pcm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed"),
]

PACKAGES = ("openai@6.49.0", "ws@8.23.0")
CERTIFICATE = Path(__file__).parent.parent / "http" / "certificates" / "server.pem"
HERE = Path(__file__).parent
LONG_S = 3 * WATCHDOG_S
"""The limit where models compute."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the client."""
    directory = tmp_path_factory.mktemp("javascript")
    install = ["npm", "install", "--no-audit", "--no-fund", "--silent", *PACKAGES]
    subprocess.run(install, cwd=directory, check=True, timeout=WATCHDOG_S)
    return directory


def run(installed: Path, program: str, server: Server, *arguments: str) -> dict[str, Any]:
    """Run a program of this directory with the server's URL and arguments; return what it prints."""
    shutil.copy(HERE / program, installed)
    ran = subprocess.run(
        ["node", program, f"{server.url}/v1", "none", *arguments],
        cwd=installed,
        env={**os.environ, "NODE_EXTRA_CA_CERTS": str(CERTIFICATE)},
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    printed: dict[str, Any] = json.loads(ran.stdout)
    return printed


def test_the_javascript_client_gets_a_spoken_answer(start: Start, installed: Path) -> None:
    with start("--ssl-certfile", str(CERTIFICATE)) as server:
        printed = run(installed, "client.mjs", server, "studio")
    assert printed == {"status": "completed", "transcript": "hello" * 3, "samples": 7200}


@pytest.mark.voice
@pytest.mark.timeout(300)  # the pipeline loads in it
def test_a_spoken_question_is_answered_in_speech(start: Start, installed: Path) -> None:
    """The server finds the turn in the sound. Its own transcriber hears the answer."""
    (installed / "question.pcm").write_bytes(pcm(converse([say("What is the capital of France?")], 20).sound))
    with start("--ssl-certfile", str(CERTIFICATE), "-s", "stages.llm.threads=1", config="voice") as server:
        printed = run(installed, "spoken_question.mjs", server, "voice", "question.pcm", "answer.pcm")
        assert printed["status"] == "completed"
        assert printed["turns"] == ["server_vad", "speech_started", "speech_stopped", "committed"]
        assert "Paris" in printed["transcript"]
        answer = np.frombuffer((installed / "answer.pcm").read_bytes(), "<i2")
        assert 1 < len(answer) / 24_000 < 10
        soundfile.write(installed / "answer.wav", answer, 24_000)
        http = openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=str(CERTIFICATE)))
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http) as client:
            wav = ("answer.wav", (installed / "answer.wav").read_bytes())
            heard = client.audio.transcriptions.create(model="voice", file=wav).text
    assert "paris" in heard.lower()
