"""A response that an error ends keeps nothing of its request, without the help of the garbage collector.

The collector visits old objects rarely in a server, because a full collection takes long.
"""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from omni_actors import config
from omni_actors.serve.access import admission
from omni_actors.serve.api.audio_schemas import SpeechRequest, TranscriptionRequest
from omni_actors.serve.api.response_schemas import ResponsesRequest
from omni_actors.serve.api.schemas import ChatRequest
from omni_actors.serve.http.errors import HTTPError, forget_frames
from omni_actors.serve.media.audio import AudioEncoder
from omni_actors.serve.server import serve
from omni_actors.serve.settings import ServerSettings
from tests.support.http_server import NO_TLS, WATCHDOG_S
from tests.support.served_engines import REFUSED_S

CONFIG = """\
name: studio
limits: LIMITS
stages:
  eye: {engine: "tests.support.served_engines:Eye", accepts: [image, messages], emits: text}
  ear: {engine: "tests.support.served_engines:Ear", accepts: [audio], emits: transcript}
  mouth: {engine: "tests.support.served_engines:Speaker", accepts: [script], emits: audio, options: {step_s: 0.01}}
"""
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,dW5zaWdodGx5"}}
REFUSED: Any = {"model": "studio", "messages": [{"role": "user", "content": [PICTURE]}]}
"""A conversation that the engine refuses."""
ITEMS: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": PICTURE["image_url"]["url"]}]}]
KEPT = (ChatRequest, ResponsesRequest, SpeechRequest, TranscriptionRequest, AudioEncoder)


@pytest.fixture
def without_collections() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.fixture
async def url(request: pytest.FixtureRequest, tmp_path: Path, without_collections: None) -> AsyncIterator[str]:
    """A server in this process. The parameter: its pipeline's limits; by default, none are set."""
    (tmp_path / "studio.yaml").write_text(CONFIG.replace("LIMITS", getattr(request, "param", "{}")))
    pipeline = config.load(tmp_path / "studio.yaml", {})
    run = partial(serve, pipeline, ServerSettings(port=0), announce=None, handles_signals=False)
    async with trio.open_nursery() as nursery:
        yield await nursery.start(run)
        nursery.cancel_scope.cancel()


def post(url: str, path: str, **asked: Any) -> int:
    """Return the status of the response, which is 0 if it was cut."""
    try:
        return httpx.post(f"{url}{path}", **asked, verify=NO_TLS, timeout=WATCHDOG_S).status_code
    except httpx.RemoteProtocolError:
        return 0


async def kept_after(request: Callable[[], int]) -> tuple[int, list[str]]:
    """Return the status of a request, and the names of the objects that stay when its response has ended."""
    with trio.fail_after(WATCHDOG_S):
        status = await trio.to_thread.run_sync(request)
        await trio.testing.wait_all_tasks_blocked()
    return status, [type(found).__name__ for found in gc.get_objects() if isinstance(found, KEPT)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.slow
async def test_a_request_that_an_engine_refuses_is_freed(url: str, stream: bool) -> None:
    asked = {**REFUSED, "stream": stream}
    assert await kept_after(lambda: post(url, "/v1/chat/completions", json=asked)) == (400, [])
    body = {"model": "studio", "input": ITEMS, "stream": stream}
    assert await kept_after(lambda: post(url, "/v1/responses", json=body)) == (400, [])


@pytest.mark.slow
async def test_a_recording_that_an_engine_refuses_is_freed(url: str, recording: Callable[..., bytes]) -> None:
    form: dict[str, Any] = {"data": {"model": "studio"}, "files": {"file": ("a.wav", recording(REFUSED_S))}}
    assert await kept_after(lambda: post(url, "/v1/audio/transcriptions", **form)) == (400, [])


async def test_the_audio_of_a_request_counts_until_its_response_has_ended(
    url: str, recording: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of silence is small, and its samples are not."""
    monkeypatch.setattr(admission, "MAX_AUDIO_BYTES", 4 * 16_000)

    def transcribe(seconds: float) -> int:
        form: dict[str, Any] = {"data": {"model": "studio"}, "files": {"file": ("a.wav", recording(seconds))}}
        return post(url, "/v1/audio/transcriptions", **form)

    for seconds, status in ((1.0, 200), (1.0, 200), (1.1, 429), (REFUSED_S, 400), (1.0, 200)):
        assert await trio.to_thread.run_sync(transcribe, seconds) == status


async def test_a_request_that_the_server_refuses_is_freed(url: str) -> None:
    bad = {"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}
    asked = {"model": "studio", "messages": [{"role": "user", "content": [bad]}]}
    assert await kept_after(lambda: post(url, "/v1/chat/completions", json=asked)) == (400, [])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
@pytest.mark.slow
async def test_a_body_that_is_too_large_is_freed(url: str, path: str) -> None:
    """The error was in a frame that its traceback kept, beside the body."""
    pieces = (b"x" * (1 << 20) for _ in range(40))
    assert (await kept_after(lambda: post(url, path, content=pieces)))[0] == 413
    assert [found for found in gc.get_objects() if isinstance(found, HTTPError)] == []


@pytest.mark.slow
def test_errors_that_caused_each_other_are_forgotten() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__context__ = second, first
    for error in (first, second):
        with suppress(ValueError):
            raise error
    forget_frames(first)
    assert (first.__traceback__, second.__traceback__) == (None, None)


@pytest.mark.parametrize("url", ["{deadline_s: 3}"], indirect=True)
@pytest.mark.parametrize("format", ["mp3", "flac"])
@pytest.mark.slow
async def test_speech_that_its_deadline_cuts_is_freed(url: str, format: str) -> None:
    """A stream is cut, and flac is refused as a whole. The speech takes 10 s."""
    asked = {"model": "studio", "input": "la " * 1000, "response_format": format}
    status, kept = await kept_after(lambda: post(url, "/v1/audio/speech", json=asked))
    assert (status, kept) == (504 if format == "flac" else 0, [])
