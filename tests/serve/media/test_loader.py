"""A request's files in its own body, and how many it may have."""

from __future__ import annotations

import pytest

from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.media.base64_data import to_base64
from omni_actors.serve.media.loader import MAX_FILES, MediaLoader, MediaReference
from tests.serve.media.loading import PIXELS, bring, data_url, image, refusal


@pytest.mark.parametrize("head", ["image/png", "IMAGE/JPEG", "image/svg+xml", "image/png;charset=utf-8"])
async def test_a_data_url_of_an_image(head: str) -> None:
    assert await bring(MediaLoader(), image(data_url(PIXELS, head))) == [PIXELS]


async def test_files_of_all_kinds_come_in_order() -> None:
    video = MediaReference(
        "video", data_url(b"frames", "video/mp4").replace("data", "DATA").replace("base64", "Base64"), "v"
    )
    sound = MediaReference("audio", to_base64(b"sound"), "a", is_base64=True)
    assert await bring(MediaLoader(), video, sound, image(data_url(PIXELS))) == [b"frames", b"sound", PIXELS]


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("data:", "invalid_image_url"),
        ("data:,", "invalid_image_url"),
        ("data:image/png,AAAA", "invalid_image_url"),
        ("data:image/png;base64", "invalid_image_url"),
        ("data:base64,AAAA", "invalid_image_url"),
        ("data:image/png;base64;x,AAAA", "invalid_image_url"),
        (f"data:image/png;{'x' * 300};base64,AAAA", "invalid_image_url"),
        ("data:;base64,AAAA", "unsupported_image_media_type"),
        ("data:video/mp4;base64,AAAA", "unsupported_image_media_type"),
        ("data:text/html;base64,AAAA", "unsupported_image_media_type"),
        ("data:image;base64,AAAA", "unsupported_image_media_type"),
        ("data:image/png;base64,AAA", "invalid_base64"),
        ("data:image/png;base64,AA A", "invalid_base64"),
        ("data:image/png;base64,AA-_", "invalid_base64"),
        ("data:image/png;base64,AAAÄ", "invalid_base64"),
        ("data:image/png;base64,", "empty_image_file"),
        ("", "invalid_image_url"),
        ("AAAA", "invalid_image_url"),
        ("/etc/passwd", "invalid_image_url"),
        ("ftp://example.org/a.png", "invalid_image_url"),
        ("gopher://127.0.0.1:25/_x", "invalid_image_url"),
        ("unix:///run/docker.sock", "invalid_image_url"),
        ("javascript:alert(1)", "invalid_image_url"),
        ("x" * 100_000, "invalid_image_url"),
        # where nothing is allowed
        ("https://example.org/a.png", "invalid_image_url"),
        ("http://localhost/a.png", "invalid_image_url"),
        ("file:///etc/passwd", "image_file_not_found"),
    ],
)
async def test_a_url_that_brings_nothing(url: str, code: str) -> None:
    assert (await refusal(MediaLoader(), image(url)))[0] == code


async def test_a_code_names_the_kind() -> None:
    reference = MediaReference("video", "https://example.org/a.mp4", "messages[0].content[0].video_url.url")
    assert (await refusal(MediaLoader(), reference))[0] == "invalid_video_url"


async def test_no_more_files_than_a_request_may_bring() -> None:
    url = data_url(b"x")
    assert len(await bring(MediaLoader(), *[image(url)] * MAX_FILES)) == MAX_FILES
    with pytest.raises(HTTPError, match=f"may have {MAX_FILES}") as caught:
        await bring(MediaLoader(), *[image(url)] * (MAX_FILES + 1))
    assert (caught.value.param, caught.value.code) == ("messages", "too_many_files")
