"""The examples for callers without trio: a notebook, an asyncio service and a plain script.

They run with a pipeline of engines without models in the shape of "voice". The notebook also runs in an IPython kernel.
The other examples are tested for their errors only.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import soundfile

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
STUDIO = """\
name: studio
stages:
  mind: {engine: echo, accepts: [messages], emits: text}
  mouth: {engine: "tests.support.served_engines:Speaker", inputs: [mind], emits: audio}
"""
PAINTER = """\
name: painter
stages:
  easel: {engine: "tests.support.painting_engine:PaintingEngine", accepts: [messages], emits: image}
"""
REPLACED = {'"voice"': '"studio.yaml"', '"shapes"': '"painter.yaml"', ", max_tokens=40": ""}
CELLS = [
    re.sub("|".join(map(re.escape, REPLACED)), lambda found: REPLACED[found[0]], "".join(cell["source"]))
    for cell in json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    if cell["cell_type"] == "code"
]
"""The cells of the notebook with these pipelines, whose engines need no model."""
PRINTED = ["What is the capital of France?", "Who wrote Faust?", "Why is the sky blue?", "Is anybody there?"]
WATCHDOG_S = 60


@pytest.fixture
def studio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the first pipeline. That of the other one is beside it, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "studio.yaml").write_text(STUDIO)
    (tmp_path / "painter.yaml").write_text(PAINTER)
    return tmp_path / "studio.yaml"


def program(name: str, *arguments: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / name), *arguments]


def test_a_plain_script_prints_the_answers_and_writes_their_speech(studio: Path) -> None:
    command = program("plain_script.py", "hello there", "hush", "--config", "studio.yaml")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WATCHDOG_S)
    assert (done.returncode, done.stdout) == (0, "hello there\n  hello there\nhush\n  hush\n"), done.stderr
    assert soundfile.info("1.wav").frames == 2 * 1600
    assert not Path("2.wav").exists()


@contextmanager
def service(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = program("asyncio_service.py", "--port", "0", *arguments)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        try:
            assert process.stdout is not None
            found = re.fullmatch(r"listening on port (\d+)\n", process.stdout.readline())
            assert found is not None
            yield process, int(found[1])
        finally:
            process.kill()


def test_an_asyncio_service_answers_clients_at_once_and_ends_by_a_signal(studio: Path) -> None:
    with service("--config", "studio.yaml") as (process, port):
        clients = [socket.create_connection(("127.0.0.1", port), WATCHDOG_S) for _ in range(3)]
        for number, client in enumerate(clients):
            client.sendall(f"question {number}\nanother one\n".encode())
        for number, client in enumerate(clients):
            with client, client.makefile() as lines:
                assert [lines.readline(), lines.readline()] == [f"question {number}\n", "another one\n"]
        with socket.create_connection(("127.0.0.1", port), WATCHDOG_S):  # a client that says nothing
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=WATCHDOG_S)
    assert (process.returncode, stdout, stderr) == (0, "", "")


def test_an_asyncio_service_refuses_a_line_that_is_too_long_and_serves_on(studio: Path) -> None:
    with service("--config", "studio.yaml") as (process, port):
        with socket.create_connection(("127.0.0.1", port), WATCHDOG_S) as client, client.makefile() as lines:
            client.sendall(b"a" * 70_000 + b"\n")
            assert lines.read() == "error: a line has 64 KiB at most\n"
        with socket.create_connection(("127.0.0.1", port), WATCHDOG_S) as client, client.makefile() as lines:
            client.sendall(b"hello\n")
            assert lines.readline() == "hello\n"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=WATCHDOG_S)
    assert (process.returncode, stdout, stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["asyncio_service.py", "--config", "studio.yaml", "--port", "PORT"], "address already in use"),
        (["realtime.py", "sound.wav", "answer.wav", "--url", "http://127.0.0.1:1/v1"], "127.0.0.1"),
        (["mixed_modalities.py", "--audio", "prompts.txt"], "prompts.txt"),
        (["qwen_omni.py", "--audio-path", "prompts.txt"], "prompts.txt"),
        (["offline_batch.py", "prompts.txt", "answers", "--config", "studio.yaml"], "utf-8"),
    ],
    ids=["asyncio_service", "realtime", "mixed_modalities", "qwen_omni", "offline_batch"],
)
def test_an_example_says_in_one_sentence_what_is_wrong(studio: Path, command: list[str], words: str) -> None:
    """PORT is in use. prompts.txt is neither sound nor text."""
    soundfile.write("sound.wav", [0.0] * 2400, 24000)
    Path("prompts.txt").write_bytes(b"\xff\xfe\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        name, *arguments = (word.replace("PORT", str(taken.getsockname()[1])) for word in command)
        done = subprocess.run(program(name, *arguments), capture_output=True, text=True, timeout=WATCHDOG_S)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert words in done.stderr.splitlines()[-1]


async def run_cells(cells: list[str]) -> None:
    """Run each cell in this event loop, as IPython does."""
    names: dict[str, Any] = {}
    for cell in cells:
        code = compile(cell, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, names)
        if inspect.iscoroutine(result):
            await result


def test_the_cells_of_the_notebook_run_in_a_loop_that_already_runs(
    studio: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(run_cells([cell for cell in CELLS if "IPython" not in cell]))
    assert capsys.readouterr().out.splitlines() == PRINTED


@pytest.mark.slow
def test_the_notebook_runs_in_a_kernel(studio: Path) -> None:
    pytest.importorskip("ipykernel")
    from jupyter_client.manager import start_new_kernel

    outputs: list[str] = []

    def keep(message: dict[str, Any]) -> None:
        content = message["content"]
        shown = content.get("data", {})
        outputs.append(content.get("text") or shown.get("text/html") or ("a picture" if "image/png" in shown else ""))

    manager, client = start_new_kernel(kernel_name="python3", cwd=str(studio.parent))
    try:
        for cell in CELLS:
            reply = client.execute_interactive(cell, timeout=WATCHDOG_S, output_hook=keep)
            assert reply["content"]["status"] == "ok", reply["content"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    assert [line for output in outputs for line in output.splitlines() if line in PRINTED] == PRINTED
    assert any("<audio" in output for output in outputs)
    assert "a picture" in outputs
