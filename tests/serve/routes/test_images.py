"""The image routes, as OpenAI's own client uses them."""

from __future__ import annotations

import base64
import io
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from click.testing import CliRunner
from openai.types import ImageEditStreamEvent, ImageGenStreamEvent
from PIL import Image
from pydantic import TypeAdapter

from omni_actors.cli import main
from omni_actors.orchestrator.retry_after import LONGEST_S
from tests.support.hostile_pictures import bomb
from tests.support.http_server import Server, Start

PAINTER = """\
name: painter
stages:
  easel:
    engine: tests.support.painting_engine:PaintingEngine
    accepts: [messages, image]
    emits: image
    deterministic: true
    options: {steps: 4}
"""
SIZE = (32, 24)
"""The width and height of a picture whose request names none."""


@pytest.fixture(scope="module")
def server(start: Start) -> Iterator[Server]:
    with start("--max-body-bytes", "1000000", "-s", "limits.max_requests=12", config=PAINTER) as server:
        yield server
        server.wait_metric("omni_requests_in_flight", 0)
        assert server.stderr == ""


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client


def opened(b64: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(b64)))


def pixels(b64: str) -> Any:
    return np.asarray(opened(b64).convert("RGB"))


def file(color: str = "red", format: str = "PNG") -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (8, 6), color).save(data, format)
    return data.getvalue()


def draw(client: openai.OpenAI, **asked: Any) -> Any:
    extra = {name: asked.pop(name) for name in ("seed", "steps", "guidance", "negative_prompt") if name in asked}
    return client.images.generate(**{"model": "painter", "prompt": "a cat", "extra_body": extra, **asked})


def test_a_picture(client: openai.OpenAI) -> None:
    answer = draw(client)
    [picture] = answer.data
    assert (opened(picture.b64_json).format, opened(picture.b64_json).size) == ("PNG", SIZE)
    assert (answer.size, answer.output_format, answer.background) == ("32x24", "png", "opaque")
    assert answer.created > 1_700_000_000
    assert (picture.url, answer.usage) == (None, None)


def test_a_picture_depends_on_its_parameters_and_on_nothing_else(client: openai.OpenAI) -> None:
    pictures = [
        draw(client, **asked).data[0].b64_json
        for asked in (
            {},
            {"seed": 0},
            {"size": "auto", "user": "me"},
            {"seed": 1},
            {"guidance": 3.5},
            {"negative_prompt": "a dog"},
            {"prompt": "a dog"},
        )
    ]
    assert len(set(pictures[:3])) == 1
    assert len(set(pictures)) == 5


@pytest.mark.parametrize("format", ["png", "jpeg", "webp"])
def test_the_size_and_the_format(client: openai.OpenAI, format: str) -> None:
    answer = draw(client, size="64x48", output_format=format)
    picture = opened(answer.data[0].b64_json)
    assert (picture.format, picture.size, answer.size) == (format.upper(), (64, 48), "64x48")


def test_a_higher_compression_value_is_a_better_picture(client: openai.OpenAI) -> None:
    sizes = [
        len(draw(client, output_format="jpeg", output_compression=quality).data[0].b64_json) for quality in (0, 50, 100)
    ]
    assert sizes == sorted(set(sizes))


def test_several_pictures_have_consecutive_seeds(client: openai.OpenAI) -> None:
    several = [picture.b64_json for picture in draw(client, n=3, seed=7).data]
    assert several == [draw(client, seed=seed).data[0].b64_json for seed in (7, 8, 9)]


@pytest.mark.parametrize(
    ("steps", "most", "previews"), [(4, 3, [1, 2, 3]), (50, 3, [13, 26, 39]), (5, 1, [3]), (1, 2, [])]
)
def test_a_stream_has_previews_and_the_picture(
    client: openai.OpenAI, steps: int, most: int, previews: list[int]
) -> None:
    events = list(draw(client, stream=True, partial_images=most, steps=steps, output_format="webp"))
    *partial, done = events
    assert [event.type for event in partial] == ["image_generation.partial_image"] * len(previews)
    assert [event.partial_image_index for event in partial] == list(range(len(previews)))
    assert done.type == "image_generation.completed"
    whole = draw(client, output_format="png", steps=steps).data[0].b64_json
    for event, step in zip(partial, previews, strict=True):
        expected = pixels(whole).astype(int) * step / steps
        assert np.abs(pixels(event.b64_json) - expected).mean() < 16  # a lossy format of coarse squares
    for event in events:
        assert (event.size, event.output_format, event.background, event.quality) == ("32x24", "webp", "opaque", "auto")
        assert event.created_at == done.created_at


def test_a_stream_of_several_pictures_tells_them_apart(client: openai.OpenAI) -> None:
    events = list(draw(client, stream=True, n=3, seed=7, partial_images=1))
    pictures = {event.index: event.b64_json for event in events if event.type == "image_generation.completed"}
    assert [pictures[index] for index in range(3)] == [each.b64_json for each in draw(client, n=3, seed=7).data]
    assert sum(event.type == "image_generation.partial_image" for event in events) == 3


@pytest.mark.parametrize(
    ("path", "prefix", "types", "more"),
    [
        ("generations", "image_generation", ImageGenStreamEvent, {}),
        ("edits", "image_edit", ImageEditStreamEvent, {"images": [{"image_url": "data:image/png;base64,%s"}]}),
    ],
)
def test_the_events_of_a_stream_are_openais(server: Server, path: str, prefix: str, types: Any, more: Any) -> None:
    """Each one has all that the client's types need, and its own type as its name."""
    body = {"model": "painter", "prompt": "a cat", "stream": True, "partial_images": 1, **more}
    content = json.dumps(body).replace("%s", base64.b64encode(file()).decode())
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    answer = server.http.post(f"/v1/images/{path}", content=content, headers=headers)
    names = []
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found = TypeAdapter(types).validate_json(data.removeprefix("data: "), strict=True)
        names.append(found.type)
        assert name == f"event: {found.type}"
    assert names == [f"{prefix}.partial_image", f"{prefix}.completed"]
    assert found.usage.total_tokens == 0


def test_progress_without_a_picture_changes_nothing(client: openai.OpenAI) -> None:
    [done] = draw(client, prompt="progress", stream=True)
    assert done.b64_json == draw(client, prompt="progress").data[0].b64_json


def test_an_edit_by_a_form_is_one_by_json(client: openai.OpenAI, server: Server) -> None:
    asked = {"model": "painter", "prompt": "a cat"}
    [picture] = client.images.edit(**asked, image=file(), extra_body={"seed": 3, "strength": 0.5}).data or []
    url = f"data:image/png;base64,{base64.b64encode(file()).decode()}"
    body = {**asked, "images": [{"image_url": url}], "seed": 3, "strength": 0.5}
    answer = server.http.post("/v1/images/edits", json=body).json()
    assert answer["data"] == [{"b64_json": picture.b64_json}]
    others = [client.images.edit(**asked, image=file()), client.images.edit(**asked, image=[file(), file("blue")])]
    found = {picture.b64_json, *(each.data[0].b64_json for each in others if each.data), draw(client).data[0].b64_json}
    assert len(found) == 4


def test_an_edit_is_streamed_too(client: openai.OpenAI) -> None:
    events = list(client.images.edit(model="painter", prompt="a cat", image=file(), stream=True, partial_images=1))
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]


@pytest.mark.parametrize(
    ("asked", "param", "code"),
    [
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": "a" * 32_001}, "prompt", "invalid_value"),
        ({"prompt": "unpaintable"}, "prompt", "invalid_value"),
        ({"prompt": "colourless"}, "prompt", "no_picture"),
        ({"size": "0x16"}, "size", "invalid_value"),
        ({"size": "16"}, "size", "invalid_value"),
        ({"size": "99999999x16"}, "size", "invalid_value"),
        ({"size": "99999x99999"}, "size", "invalid_value"),
        ({"size": "8000x8000", "n": 10}, "n", "invalid_value"),
        ({"steps": 0}, "steps", "invalid_value"),
        ({"steps": 10_000}, "steps", "invalid_value"),
        ({"steps": 10**18, "stream": True, "partial_images": 1}, "steps", "invalid_value"),
        ({"steps": -5, "stream": True, "partial_images": 1}, "steps", "invalid_value"),
        ({"guidance": -1}, "guidance", "invalid_value"),
        ({"guidance": 1e300}, "guidance", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 11}, "n", "invalid_value"),
        ({"partial_images": 4, "stream": True}, "partial_images", "invalid_value"),
        ({"partial_images": 1}, "partial_images", "invalid_value"),
        ({"output_compression": 50}, "output_compression", "unsupported_parameter"),
        ({"output_format": "gif"}, "output_format", "invalid_value"),
        ({"output_format": "webp", "size": "16384x16"}, "output_format", "invalid_value"),
        ({"output_format": "jpeg", "size": "16x65501", "stream": True}, "output_format", "invalid_value"),
        ({"response_format": "url"}, "response_format", "invalid_value"),
        ({"background": "transparent"}, "background", "invalid_value"),
        ({"quality": "high"}, "quality", "invalid_value"),
        ({"style": "vivid"}, "style", "unsupported_parameter"),
        ({"previews": 1}, "previews", "unsupported_parameter"),
        ({"progress": 1}, "progress", "unsupported_parameter"),
        ({"strength": "much"}, "strength", "invalid_value"),
        ({"modalities": ["text"]}, "modalities", "unknown_parameter"),
    ],
)
def test_a_wrong_field_is_named(server: Server, asked: dict[str, Any], param: str, code: str) -> None:
    answer = server.http.post("/v1/images/generations", json={"model": "painter", "prompt": "a cat", **asked})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error


def test_a_picture_that_is_larger_than_its_format_allows(start: Start) -> None:
    """Its size is known when it is made, as that of an edited picture may be."""
    with start("-s", "stages.easel.options.size=16384x8", config=PAINTER) as server, server.openai() as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="webp has at most 16383 pixels a side") as refused:
                draw(client, output_format="webp", stream=stream)
            assert refused.value.param == "output_format"
        assert opened(draw(client, output_format="jpeg").data[0].b64_json).size == (16384, 8)
        assert server.stderr == ""


@pytest.mark.parametrize(
    ("fields", "files", "param"),
    [
        ({}, {}, "image"),
        ({}, {"mask": file(), "image": file()}, "mask"),
        ({}, {"image": b""}, "image"),
        ({"guidance": "nan"}, {"image": file()}, "guidance"),
        ({"strength": "inf"}, {"image": file()}, "strength"),
        ({"seed": "x"}, {"image": file()}, "seed"),
        ({"n": "11"}, {"image": file()}, "n"),
    ],
)
def test_a_wrong_form_is_refused(server: Server, fields: dict[str, str], files: dict[str, bytes], param: str) -> None:
    form: Any = {name: (f"{name}.png", data) for name, data in files.items()} or {"none": (None, "")}
    answer = server.http.post("/v1/images/edits", data={"model": "painter", "prompt": "a cat", **fields}, files=form)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize(
    ("images", "param"),
    [
        ([], "images"),
        ([{"image_url": "https://example.org/a.png"}], "images[0].image_url"),
        ([{"image_url": "data:image/png;base64,!"}], "images[0].image_url"),
        ([{"file_id": "file-1"}], "images[0].file_id"),
        ([{"image_url": "data:image/png;base64,"}] * 17, "images"),
    ],
)
def test_a_wrong_picture_in_json_is_refused(server: Server, images: Any, param: str) -> None:
    body = {"model": "painter", "prompt": "a cat", "images": images}
    answer = server.http.post("/v1/images/edits", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_more_files_than_openai_allows(server: Server) -> None:
    files = [("image[]", ("a.png", b"x"))] * 17
    answer = server.http.post("/v1/images/edits", data={"model": "painter", "prompt": "a cat"}, files=files)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")


def test_another_model_does_not_exist(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        draw(client, model="gpt-image-2.5-flare")


def test_a_pipeline_without_pictures(studio: Server) -> None:
    for body in ({}, {"images": [{"image_url": "data:image/png;base64,AAAA"}]}):
        path = "edits" if body else "generations"
        answer = studio.http.post(f"/v1/images/{path}", json={"model": "studio", "prompt": "a cat", **body})
        assert answer.status_code == 400, answer.text


def test_the_death_of_a_worker_is_an_event_of_the_stream(start: Start) -> None:
    with start("-s", "limits.replays=0", config=PAINTER) as server, server.openai() as client:
        events = draw(client, prompt="deadly", stream=True, partial_images=3)
        assert next(events).partial_image_index == 0
        with pytest.raises(openai.APIError, match="stage 'easel'"):
            next(events)


@pytest.mark.slow
def test_a_full_server_says_when_the_next_picture_is_done(start: Start) -> None:
    """A picture of 200 steps of 0.2 s has the only place. The denoiser's pace gives the time: no request has ended."""
    slow = ("-s", "stages.easel.options.step_s=0.2", "-s", "stages.easel.step_timeout_s=10")
    body: dict[str, Any] = {"model": "painter", "prompt": "a cat"}
    with start("-s", "limits.max_requests=1", *slow, config=PAINTER) as server:
        request = server.http.build_request("POST", "/v1/images/generations", json={**body, "steps": 200})
        with socket.create_connection(("127.0.0.1", server.port), 60) as client:
            head = "POST /v1/images/generations HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(request.content)}\r\n\r\n".encode() + request.content)
            figure = 'omni_engine{name="next_end_s",replica="0",stage="easel"}'
            server.wait(lambda: server.metric(figure) > 0, figure)
            refused = server.http.post("/v1/images/generations", json=body)
            refused_edit = server.http.post("/v1/images/edits", data=body, files={"image": ("a.png", file())})
        for answer in (refused, refused_edit):
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded"), answer.text
            assert 10 <= int(answer.headers["retry-after"]) <= LONGEST_S, "more than 40 if a step stood still"


# in conversations


def ask(client: openai.OpenAI, content: Any, **asked: Any) -> Any:
    messages: Any = [{"role": "user", "content": content}]
    return client.chat.completions.create(model="painter", messages=messages, **asked)


def part_of(b64: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64}"}}


@pytest.mark.parametrize("modalities", [None, ["image"], ["image", "text"]])
def test_an_answer_is_a_picture(client: openai.OpenAI, modalities: list[str] | None) -> None:
    more: Any = {} if modalities is None else {"modalities": modalities}
    answer = ask(client, "a cat", seed=5, extra_body={"size": "64x48", "steps": 2}, **more)
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.message.content == [part_of(draw(client, seed=5, size="64x48", steps=2).data[0].b64_json)]


def test_a_streamed_answer_has_the_picture_as_a_part(client: openai.OpenAI) -> None:
    deltas = [chunk.choices[0].delta.content for chunk in ask(client, "a cat", stream=True)]
    assert deltas == [None, [part_of(draw(client).data[0].b64_json)], None]


def test_the_next_question_may_change_the_picture(client: openai.OpenAI) -> None:
    picture = draw(client).data[0].b64_json
    history: Any = [
        {"role": "user", "content": "a cat"},
        {"role": "assistant", "content": [part_of(picture)]},
        {"role": "user", "content": "at night"},
    ]
    changed = client.chat.completions.create(model="painter", messages=history).choices[0].message.content
    assert changed != ask(client, "at night").choices[0].message.content


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"modalities": ["image", "audio"]}, "modalities"),
        ({"modalities": ["text"]}, "modalities"),
        ({"modalities": []}, "modalities"),
        ({"n": 2}, "n"),
        ({"previews": 1}, "previews"),
        ({"size": "99999x99999"}, "size"),
    ],
)
def test_what_an_answer_with_pictures_cannot_have(server: Server, asked: dict[str, Any], param: str) -> None:
    body = {"model": "painter", "messages": [{"role": "user", "content": "a cat"}], **asked}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


# with a model


@pytest.mark.slow
def test_a_model_draws_and_edits(start: Start, tmp_path: Path) -> None:
    """A tiny Qwen-Image with random weights, opened by its directory."""
    from tiny_models import qwen_image  # loads torch, which most tests of the server do without

    with start(config=str(qwen_image.save(tmp_path / "model"))) as server, server.openai() as client:
        asked: Any = {"model": "model", "prompt": "a cat", "size": "64x48", "extra_body": {"steps": 4, "seed": 1}}
        *previews, done = client.images.generate(**asked, stream=True, partial_images=3)
        assert [opened(event.b64_json).size for event in (*previews, done)] == [(64, 48)] * 4
        two = client.images.generate(**asked, n=2).data or []
        assert len({picture.b64_json for picture in two}) == 2
        [edited] = client.images.edit(**asked, image=file()).data or []
        assert edited.b64_json not in {picture.b64_json for picture in two}
        for data, code in ((b"no picture", "invalid_image"), (bomb(), "image_too_large")):
            with pytest.raises(openai.BadRequestError) as refused:
                client.images.edit(**asked, image=data)
            assert (refused.value.param, refused.value.code) == ("image", code)
        with pytest.raises(openai.BadRequestError, match="multiples"):
            client.images.generate(model="model", prompt="a cat", size="63x48")
        for wrong, param in (
            ({"extra_body": {"scheduler": "ddim"}}, "scheduler"),
            ({"prompt": "word " * 6000}, "prompt"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                client.images.generate(**{**asked, **wrong})
            assert refused.value.param == param
        server.wait_metric("omni_requests_in_flight", 0)


def test_bench_loads_the_route(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    size = ("--extra", '{"size": "32x32"}')
    arguments = ["--url", server.url, "--endpoint", "images", "--requests", "2", "--warmup", "0", *size]
    result = CliRunner().invoke(main, ["bench", *arguments, "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert json.loads(file.read_bytes())["figures"]["e2e"]["count"] == 2
