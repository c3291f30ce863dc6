"""Images and videos in /v1/chat/completions, and the parameters of omni models, as OpenAI's own client sends them."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import trio

from omni_actors import config
from omni_actors.serve.api.schemas import ChatRequest, parse
from omni_actors.serve.media.loader import MediaLoader
from omni_actors.serve.routes.chat import parameters_of
from omni_actors.serve.server import serve
from omni_actors.serve.settings import ServerSettings

MAX_BODY_BYTES = ServerSettings().max_body_bytes

PICTURE, FILM = b"a picture", b"a film" * 1000


@pytest.fixture
def client(gallery: Any) -> Iterator[openai.OpenAI]:
    with gallery.server.openai() as client:
        yield client


@pytest.fixture
def folder(gallery: Any) -> Path:
    folder: Path = gallery.folder
    return folder


def part(kind: str, url: str, **fields: str) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url, **fields}}


def data_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


class Given(NamedTuple):
    """What the pipeline was given."""

    params: dict[str, Any]
    files: list[dict[str, Any]]
    messages: list[Any]


def ask(client: openai.OpenAI, *parts: dict[str, Any], messages: Any = None, **arguments: Any) -> Given:
    messages = messages or [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}]
    answer = client.chat.completions.create(model="gallery", messages=messages, **arguments)
    lines = [json.loads(line) for line in (answer.choices[0].message.content or "").splitlines()]
    [[params], [messages]] = [[line[name] for line in lines if name in line] for name in ("params", "messages")]
    return Given(params, [line for line in lines if "digest" in line], messages)


def seen(kind: str, index: int, data: bytes) -> dict[str, Any]:
    return {f"encoded_{kind}": index, "digest": hashlib.sha256(data).hexdigest()}


def test_the_name_of_a_participant_reaches_the_pipeline(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "name": "Ann", "content": "hello"}, {"role": "user", "content": "hello"}]
    assert ask(client, messages=messages).messages == messages


def test_an_image_and_a_video_reach_the_pipeline_as_they_are(client: openai.OpenAI) -> None:
    shown = [part("image", data_url("image/png", PICTURE), detail="high"), part("video", data_url("video/mp4", FILM))]
    given = ask(client, *shown)
    assert given.files == [seen("image", 0, PICTURE), seen("video", 0, FILM)]
    places = [{"type": "image", "index": 0}, {"type": "video", "index": 0}, {"type": "text", "text": "what is it?"}]
    assert given.messages == [{"role": "user", "content": places}]


def test_each_kind_is_counted_for_itself_through_the_whole_conversation(
    client: openai.OpenAI, recording: Callable[..., bytes]
) -> None:
    sound = base64.b64encode(recording(0.5)).decode()
    images = [part("image", data_url("image/jpeg", bytes([n]))) for n in range(3)]
    film = part("video", data_url("video/webm", FILM))
    voice = {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}}
    messages = [
        {"role": "user", "content": [images[0], voice, images[1]]},
        {"role": "assistant", "content": "a picture"},
        {"role": "user", "content": [film, images[2], voice]},
    ]
    given = ask(client, messages=messages)
    places = [(place["type"], place["index"]) for n in (0, 2) for place in given.messages[n]["content"]]
    assert places == [("image", 0), ("audio", 0), ("image", 1), ("video", 0), ("image", 2), ("audio", 1)]
    assert [file for file in given.files if "encoded_image" in file] == [seen("image", n, bytes([n])) for n in range(3)]
    assert [file["audio"] for file in given.files if "audio" in file] == [0, 1]


def test_a_file_of_an_allowed_folder(client: openai.OpenAI, folder: Path) -> None:
    (folder / "a.png").write_bytes(PICTURE)
    assert ask(client, part("image", f"file://{folder}/a.png")).files == [seen("image", 0, PICTURE)]


def test_a_file_that_the_server_must_not_read(client: openai.OpenAI, folder: Path) -> None:
    (folder / "link").symlink_to("/proc/self/environ")
    for path in ("/etc/passwd", f"{folder}/link", f"{folder}/../{folder.name}/../x", "/proc/self/environ"):
        error = refusal(client, part("image", f"file://{path}"))
        assert (error.param, error.code) == ("messages[0].content[0].image_url.url", "image_file_not_found")


def refusal(client: openai.OpenAI, *parts: dict[str, Any], **arguments: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, *parts, **arguments)
    assert caught.value.type == "invalid_request_error"
    return caught.value


def test_a_host_that_the_server_must_not_fetch_from(client: openai.OpenAI, gallery: Any) -> None:
    """The host exists and its name is allowed, but its address is this machine's."""
    port = gallery.site.getsockname()[1]
    error = refusal(client, {"type": "text", "text": "look"}, part("image", f"http://localhost:{port}/a.png"))
    assert (error.param, error.code) == ("messages[0].content[1].image_url.url", "invalid_image_url")
    assert "resolves to no public address" in error.message
    for url in (f"http://127.0.0.1:{port}/", f"http://[::1]:{port}/", "http://169.254.169.254/latest/meta-data/"):
        assert refusal(client, part("video", url)).code == "invalid_video_url"
    gallery.site.settimeout(0)
    with pytest.raises(BlockingIOError):
        gallery.site.accept()


def test_an_image_that_the_engine_refuses(client: openai.OpenAI) -> None:
    error = refusal(client, part("image", data_url("image/png", b"unsightly")))
    assert (error.param, error.code) == ("messages", "invalid_value")
    assert "messages: this image is refused" in error.message


def test_a_streamed_answer_is_refused_with_a_status_too(client: openai.OpenAI) -> None:
    error = refusal(client, part("image", data_url("text/plain", PICTURE)), stream=True)
    assert error.code == "unsupported_image_media_type"


def test_parameters_of_omni_models(client: openai.OpenAI) -> None:
    more = {"top_k": 7, "repetition_penalty": 1.1, "use_audio_in_video": True, "speaker": "ethan"}
    assert ask(client, seed=5, extra_body=more).params == {"seed": 5, **more}


@pytest.mark.parametrize("value", [True, False, None])
def test_the_parameter_of_video_in_vllms_shape(client: openai.OpenAI, value: bool | None) -> None:
    params = ask(client, extra_body={"mm_processor_kwargs": {"use_audio_in_video": value}}).params
    assert params == ({} if value is None else {"use_audio_in_video": value})


SPEAKS = """\
name: gallery
stages:
  thinker: {engine: qwen3_thinker, model: /model, accepts: [messages], emits: text}
  talker: {engine: qwen3_talker, model: /model, inputs: [thinker]}
  wave: {engine: qwen3_code2wav, model: /model, inputs: [talker], emits: audio}
"""
MUTE = """\
name: gallery
stages:
  eye: {engine: echo, accepts: [messages], emits: text}
"""


@pytest.mark.parametrize(
    ("pipeline", "asked", "params", "called"),
    [
        (SPEAKS, {"audio": {"voice": "ethan"}, "modalities": ["text", "audio"]}, {"speaker": "ethan"}, "audio.voice"),
        (SPEAKS, {"audio": {"voice": "ethan"}}, {}, None),
        (SPEAKS, {"speaker": "aiden"}, {"speaker": "aiden"}, "speaker"),
        (SPEAKS, {"audio": {"voice": "Alloy"}, "modalities": ["text", "audio"]}, {}, None),
        (
            SPEAKS,
            {"audio": {"voice": "ethan"}, "modalities": ["text", "audio"], "speaker": "aiden"},
            {"speaker": "aiden"},
            "speaker",
        ),
        (MUTE, {"audio": {"voice": "ethan"}, "modalities": ["text", "audio"]}, {}, None),
    ],
)
def test_a_voice_is_a_speaker_where_there_are_some(
    tmp_path: Path, pipeline: str, asked: dict[str, Any], params: dict[str, Any], called: str | None
) -> None:
    (tmp_path / "pipeline.yaml").write_text(pipeline)
    fields = {"model": "gallery", "messages": [{"role": "user", "content": "hello"}], **asked}
    found, names = parameters_of(*parse(fields, ChatRequest), config.load(tmp_path / "pipeline.yaml"))
    assert (found, names.get("speaker")) == (params, called)


def test_files_as_large_as_a_request_may_be(client: openai.OpenAI, folder: Path) -> None:
    """24 MiB in a data: URL, or 32 MiB by name, less the body, fit the limit that a server has by itself."""
    film = os.urandom(MAX_BODY_BYTES * 3 // 4 - 3000)
    assert ask(client, part("video", data_url("video/mp4", film))).files == [seen("video", 0, film)]
    named = folder / "large.mp4"
    with named.open("wb") as file:
        file.truncate(MAX_BODY_BYTES)  # a hole: it is not read
    error = refusal(client, part("video", f"file://{named}"))
    assert error.code == "video_file_too_large"
    assert f"larger than {MAX_BODY_BYTES} bytes" in error.message


async def test_a_url_of_an_allowed_host(tmp_path: Path, nursery: trio.Nursery) -> None:
    """Whole, in this process: a server that may connect to this machine."""
    site, url = await _site(nursery, PICTURE)
    media = MediaLoader([site], may_connect=lambda address: address.is_loopback)
    (tmp_path / "echo.yaml").write_text(
        "name: gallery\nstages:\n  eye: {engine: echo, accepts: [image, messages], emits: text}\n"
    )
    send, receive = trio.open_memory_channel[str](9)
    nursery.start_soon(
        partial(serve, tmp_path / "echo.yaml", ServerSettings(port=0), media=media, announce=send.send_nowait)
    )
    with trio.fail_after(60):
        address = (await receive.receive()).split()[2].rstrip(";")
        await receive.receive()
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            content: Any = [part("image", url), {"type": "text", "text": "what is it?"}]
            messages: Any = [{"role": "user", "content": content}]
            answer = await client.chat.completions.create(model="gallery", messages=messages)
            assert answer.choices[0].message.content
            content[0] = part("image", f"{url}x")
            with pytest.raises(openai.BadRequestError, match="status 404"):
                await client.chat.completions.create(model="gallery", messages=messages)
    nursery.cancel_scope.cancel()


async def _site(nursery: trio.Nursery, body: bytes) -> tuple[str, str]:
    """A web server with one file: its domain, and the file's URL."""

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            found = (await stream.receive_some()).split()[1] == b"/a.png"
            status = b"200 OK" if found else b"404 Not Found"
            await stream.send_all(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)

    [listener] = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
    site = f"localhost:{listener.socket.getsockname()[1]}"
    return site, f"http://{site}/a.png"
