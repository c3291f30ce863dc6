"""OpenAI's own JavaScript client, unchanged. It always uses TLS. Needs node and npm; npm installs the client."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

from bench.turns import converse, say
from tests.support.http_server import WATCHDOG_S, Server, Start
from tests.support.realtime import pcm, silence

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


@pytest.fixture(scope="module")
def encrypted(start: Start) -> Iterator[Server]:
    """The pipeline "studio", with TLS."""
    with start("--ssl-certfile", str(CERTIFICATE)) as server:
        yield server


@pytest.fixture(scope="module")
def encrypted_voice(start: Start) -> Iterator[Server]:
    """The real pipeline, with TLS."""
    with start("--ssl-certfile", str(CERTIFICATE), "-s", "stages.llm.threads=1", config="voice") as server:
        yield server


def test_the_javascript_client_gets_a_spoken_answer(encrypted: Server, installed: Path) -> None:
    printed = run(installed, "client.mjs", encrypted, "studio")
    assert printed == {"status": "completed", "transcript": "hello" * 3, "samples": 7200}


WORDS = [f"word{number}" for number in range(100)]
CUT_MS = 350
"""Where the client cuts an answer, each of whose words lasts 0.1 s."""


@pytest.mark.voice
def test_the_javascript_client_speaks_into_an_answer(encrypted: Server, installed: Path) -> None:
    """The first answer lasts 30 s. The client speaks in its second second, is answered, and cuts that answer itself."""
    speech = silence(1) + pcm(say("Tell me a story about a fox.")) + silence(1)
    (installed / "speech.pcm").write_bytes(speech)
    question = " ".join(WORDS) + " "
    printed = run(installed, "barge_in.mjs", encrypted, "studio", question, "speech.pcm", str(CUT_MS))
    assert printed["turns"] == [
        *("speech_started", "cancelled turn_detected", "truncated"),
        *("speech_stopped", "committed", "completed", "truncated"),
    ]
    by_server, by_client = printed["truncated"]
    assert by_server["answer"] == 0
    assert by_server["audio_end_ms"] >= 500, "the speech begins after 1 s, and the player after 0.1 s"
    assert by_client == {"answer": 1, "audio_end_ms": CUT_MS}
    first, second = printed["retrieved"]
    assert (first["answer"], second["answer"]) == (0, 1)
    heard = first["transcript"].split()
    assert 0 < len(heard) < len(WORDS)
    assert question.startswith(first["transcript"])
    # While the sound is not complete, words count as longer than their 0.1 s, as in usual speech.
    assert by_server["audio_end_ms"] // 500 <= len(heard) <= by_server["audio_end_ms"] / 100 + 1
    seconds, *rest = second["transcript"].split()
    assert float(seconds) > 1, "the ear says how much it has heard"
    assert rest == ["s", "at"], "three words of 0.1 s"


@pytest.mark.voice
@pytest.mark.timeout(300)  # the pipeline loads in it
@pytest.mark.parametrize("noise_db", [20, 10])
def test_a_spoken_question_is_answered_in_speech(encrypted_voice: Server, installed: Path, noise_db: int) -> None:
    """The server finds the turn in sound with noise ``noise_db`` below it. Its own transcriber hears the answer."""
    question = converse([say("What is the capital of France?")], noise_db)
    (installed / "question.pcm").write_bytes(pcm(question.sound))
    printed = run(installed, "spoken_question.mjs", encrypted_voice, "voice", "question.pcm", "answer.pcm")
    assert printed["status"] == "completed"
    assert printed["turns"] == ["server_vad", "speech_started", "speech_stopped", "committed"]
    assert "Paris" in printed["transcript"]
    answer = np.frombuffer((installed / "answer.pcm").read_bytes(), "<i2")
    assert 1 < len(answer) / 24_000 < 10
    soundfile.write(installed / "answer.wav", answer, 24_000)
    http = openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=str(CERTIFICATE)))
    with openai.OpenAI(base_url=f"{encrypted_voice.url}/v1", api_key="none", http_client=http) as client:
        wav = ("answer.wav", (installed / "answer.wav").read_bytes())
        heard = client.audio.transcriptions.create(model="voice", file=wav).text
    assert "paris" in heard.lower()
