"""The Python of "the same call", run as a viewer runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.chromium import EXECUTABLE, Page, open_page
from tests.support.http_server import WATCHDOG_S, Server, Start

pytestmark = [
    pytest.mark.skipif(EXECUTABLE is None, reason="there is no Chromium on this machine"),
    pytest.mark.slow,
]

PAINTER = """\
name: painter
stages:
  easel: {engine: "tests.support.painting_engine:PaintingEngine", accepts: [messages, image], emits: image}
"""
EXAMPLE = "[...document.querySelectorAll('dialog[open] pre')].map((each) => each.innerText)"
PICTURE = {"image_url": "data:image/png;base64," + 100 * "A"}


@pytest.fixture(scope="module")
def painter(start: Start) -> Iterator[Server]:
    with start(config=PAINTER) as server:
        yield server


@pytest.fixture(scope="module")
def page(painter: Server) -> Iterator[Page]:
    with open_page() as page:
        page.open(painter.url)
        page.wait("document.querySelector('#question')")
        yield page
        assert page.errors == []


def test_before_there_is_a_call_the_example_is_what_the_pipeline_can_do(page: Page) -> None:
    page.key("c", "KeyC", "c")
    curl, python = page.wait(f"{EXAMPLE}.length && {EXAMPLE}")
    page.key("Escape", "Escape")
    page.wait("!document.querySelector('dialog')")
    assert "/v1/images/generations" in curl
    assert "client.images.generate(" in python


@pytest.mark.parametrize(
    ("path", "body", "printed"),
    [
        ("/v1/images/generations", {"prompt": "a cat"}, "image_generation.completed"),
        ("/v1/images/edits", {"prompt": "a cat", "images": [PICTURE]}, "image_edit.completed"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a cat"}]}, "chat.completion.chunk"),
    ],
)
def test_the_python_of_a_call_prints_its_events(
    page: Page, tmp_path: Path, path: str, body: dict[str, Any], printed: str
) -> None:
    call = {"path": path, "body": {"model": "painter", **body, "stream": True}}
    update = f"talk.update({{lastCall: {json.dumps(call)}}})"
    page.evaluate(f"import('/page/js/conversation.js').then(({{talk}}) => {update})")
    page.key("c", "KeyC", "c")
    program = page.wait("[...document.querySelectorAll('dialog[open] pre')].at(-1)?.innerText")
    page.key("Escape", "Escape")
    page.wait("!document.querySelector('dialog')")
    Image.new("RGB", (8, 6), "red").save(tmp_path / "picture.png")
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=WATCHDOG_S)
    assert (run.returncode, run.stderr) == (0, "")
    assert printed in run.stdout
