"""While an answer is made, the server does not refer to the body of its request, nor to the files in it.

A body may be large, and nothing counts it any more when the system has the request.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from omni_actors import config
from omni_actors.serve.server import serve
from omni_actors.serve.settings import ServerSettings
from tests.support.http_server import NO_TLS, WATCHDOG_S

CONFIG = """\
name: studio
stages:
  eye: {engine: "tests.support.served_engines:HeldEye", accepts: [image, messages], emits: text, options: OPTIONS}
  ear: {engine: "tests.support.served_engines:HeldEar", accepts: [audio], emits: transcript, options: OPTIONS}
  easel: {engine: "tests.support.served_engines:HeldPainter", accepts: [image, messages], emits: image,
          options: OPTIONS}
"""
SIZE = 1_000_022
"""The characters of a picture's URL, or the bytes of a file. Nothing else has about as many."""
BOUNDARY = "0123456789abcdef"


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """A server in this process, whose engines wait for the file "until". Memory is traced."""
    options = json.dumps({name: str(tmp_path / name) for name in ("until", "waits")})
    (tmp_path / "studio.yaml").write_text(CONFIG.replace("OPTIONS", options))
    pipeline = config.load(tmp_path / "studio.yaml", {})
    run = partial(serve, pipeline, ServerSettings(port=0), announce=None, handles_signals=False)
    tracemalloc.start()
    try:
        async with trio.open_nursery() as nursery:
            yield await nursery.start(run)
            nursery.cancel_scope.cancel()
    finally:
        tracemalloc.stop()


def picture() -> str:
    head = "data:image/png;base64,"
    return head + (SIZE - len(head)) * "A"


def with_json(path: str, ask: Callable[[str], dict[str, Any]], **fields: Any) -> tuple[str, bytes, str]:
    """Return a path, a body with a picture, and its content type. ask: makes the body of the picture's URL."""
    return path, json.dumps({"model": "studio", **ask(picture()), **fields}).encode(), "application/json"


def chat(url: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


def items(url: str) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}


def edit(url: str) -> dict[str, Any]:
    return {"prompt": "a cat", "images": [{"image_url": url}]}


def with_file(path: str, recording: Callable[..., bytes], **fields: str) -> tuple[str, bytes, str]:
    """Return a path, a form with a recording, and its content type."""
    head = recording(1.0)
    parts = [f'name="{name}"\r\n\r\n{value}' for name, value in {"model": "studio", **fields}.items()]
    lines = [f"--{BOUNDARY}\r\nContent-Disposition: form-data; {part}\r\n" for part in parts]
    lines.append(f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n')
    body = "".join(lines).encode() + head + bytes(SIZE - len(head)) + f"\r\n--{BOUNDARY}--\r\n".encode()
    return path, body, f"multipart/form-data; boundary={BOUNDARY}"


def in_memory() -> int:
    """Return how many texts and bytes of ``SIZE`` there are. A text has a head of 49 bytes, other bytes one of 33."""
    sizes = [trace.size for trace in tracemalloc.take_snapshot().traces]
    return sum(SIZE + 33 <= size <= SIZE + 49 for size in sizes)


async def kept(url: str, tmp_path: Path, asked: tuple[str, bytes, str]) -> int:
    """Return what is ``in_memory`` while the answer to a request is made."""
    path, body, kind = asked
    headers, limits = {"content-type": kind}, {"verify": NO_TLS, "timeout": WATCHDOG_S}
    post = partial(httpx.post, f"{url}{path}", content=body, headers=headers, **limits)
    found = -1
    with trio.fail_after(WATCHDOG_S):
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                response = await trio.to_thread.run_sync(post)
                assert response.status_code == 200, response.text

            nursery.start_soon(send)
            while not (tmp_path / "waits").exists():  # noqa: ASYNC110
                await trio.sleep(0.02)
            await trio.testing.wait_all_tasks_blocked(0.1)
            found = in_memory()
            (tmp_path / "until").touch()
    for name in ("until", "waits"):
        (tmp_path / name).unlink()
    return found


async def test_a_body_is_free_while_its_answer_is_made(url: str, tmp_path: Path) -> None:
    for stream in (False, True):
        assert await kept(url, tmp_path, with_json("/v1/chat/completions", chat, stream=stream)) == 0
        assert await kept(url, tmp_path, with_json("/v1/responses", items, store=False, stream=stream)) == 0
        assert await kept(url, tmp_path, with_json("/v1/images/edits", edit, stream=stream)) == 0


async def test_a_conversation_that_will_be_stored_is_in_memory_once(url: str, tmp_path: Path) -> None:
    for count, stream in enumerate((False, True), 1):
        assert await kept(url, tmp_path, with_json("/v1/responses", items, stream=stream)) == count


async def test_a_file_is_free_while_its_words_are_written(
    url: str, tmp_path: Path, recording: Callable[..., bytes]
) -> None:
    assert await kept(url, tmp_path, with_file("/v1/audio/transcriptions", recording)) == 0
    assert await kept(url, tmp_path, with_file("/v1/audio/transcriptions", recording, stream="true")) == 0
    assert await kept(url, tmp_path, with_file("/v1/audio/translations", recording)) == 0
