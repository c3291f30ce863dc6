"""While an answer is made, the server does not refer to the body of its request, nor to the files in it.

A body may be large, and nothing counts it any more when the system has the request.
"""

from __future__ import annotations

import gc
import json
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from omni_actors import config
from omni_actors.serve.api.response_schemas import ResponsesRequest
from omni_actors.serve.api.schemas import ChatRequest
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
"""The characters of a picture's URL, or the bytes of a file. Nothing else has as many."""
BOUNDARY = "0123456789abcdef"


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """A server in this process, whose engines wait for the file "until"."""
    options = json.dumps({name: str(tmp_path / name) for name in ("until", "waits")})
    (tmp_path / "studio.yaml").write_text(CONFIG.replace("OPTIONS", options))
    pipeline = config.load(tmp_path / "studio.yaml", {})
    run = partial(serve, pipeline, ServerSettings(port=0), announce=None, handles_signals=False)
    async with trio.open_nursery() as nursery:
        yield await nursery.start(run)
        nursery.cancel_scope.cancel()


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


def referred() -> Iterator[tuple[str, int]]:
    """Yield the type of each object that refers to a text or to bytes of ``SIZE``, and the identity of these."""
    gc.unfreeze()
    pending, seen = gc.get_objects(), set[int]()
    while pending:
        owner = pending.pop()
        for found in gc.get_referents(owner):
            if isinstance(found, str | bytes):
                if len(found) == SIZE:
                    yield type(owner).__name__, id(found)
            elif not gc.is_tracked(found) and id(found) not in seen:
                seen.add(id(found))
                pending.append(found)


async def kept(url: str, tmp_path: Path, asked: tuple[str, bytes, str]) -> list[tuple[str, int]]:
    """Return what ``referred`` finds while the answer to a request is made."""
    path, body, kind = asked
    headers, limits = {"content-type": kind}, {"verify": NO_TLS, "timeout": WATCHDOG_S}
    post = partial(httpx.post, f"{url}{path}", content=body, headers=headers, **limits)
    found: list[tuple[str, int]] = []
    with trio.fail_after(WATCHDOG_S):
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                response = await trio.to_thread.run_sync(post)
                assert response.status_code == 200, response.text

            nursery.start_soon(send)
            while not (tmp_path / "waits").exists():  # noqa: ASYNC110
                await trio.sleep(0.02)
            await trio.testing.wait_all_tasks_blocked(0.1)
            found = list(referred())
            (tmp_path / "until").touch()
    for name in ("until", "waits"):
        (tmp_path / name).unlink()
    return found


async def test_a_body_is_free_while_its_answer_is_made(url: str, tmp_path: Path) -> None:
    for stream in (False, True):
        assert await kept(url, tmp_path, with_json("/v1/chat/completions", chat, stream=stream)) == []
        assert await kept(url, tmp_path, with_json("/v1/responses", items, store=False, stream=stream)) == []
        assert await kept(url, tmp_path, with_json("/v1/images/edits", edit, stream=stream)) == []


async def test_a_conversation_that_will_be_stored_is_in_memory_once(url: str, tmp_path: Path) -> None:
    ids = set[int]()
    for count, stream in enumerate((False, True), 1):
        found = await kept(url, tmp_path, with_json("/v1/responses", items, stream=stream))
        assert {name for name, _ in found} == {"ImageURL"}
        ids |= {identity for _, identity in found}
        assert len(ids) == count
        assert [each for each in gc.get_objects() if isinstance(each, ResponsesRequest | ChatRequest)] == []


async def test_a_file_is_free_while_its_words_are_written(
    url: str, tmp_path: Path, recording: Callable[..., bytes]
) -> None:
    assert await kept(url, tmp_path, with_file("/v1/audio/transcriptions", recording)) == []
    assert await kept(url, tmp_path, with_file("/v1/audio/transcriptions", recording, stream="true")) == []
    assert await kept(url, tmp_path, with_file("/v1/audio/translations", recording)) == []
