"""Requests for files, made to a media loader as an HTTP route makes them."""

from __future__ import annotations

import pytest
import trio

from omni_actors.serve.access.admission import AdmissionTicket
from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.media.base64_data import to_base64
from omni_actors.serve.media.loader import MediaLoader, MediaReference
from tests.support.admission import admission_control

PIXELS = bytes(range(200))
PLACE = "messages[0].content[1].image_url.url"


def ticket(max_bytes: int = 1000, of_all: int = 4000) -> AdmissionTicket:
    return admission_control(max_bytes=of_all, max_request_bytes=max_bytes).admit()


def image(url: str) -> MediaReference:
    return MediaReference("image", url, PLACE)


async def bring(media: MediaLoader, *references: MediaReference, into: AdmissionTicket | None = None) -> list[bytes]:
    with trio.fail_after(60):
        return await media.load(references, into or ticket())


async def refusal(
    media: MediaLoader, reference: MediaReference, into: AdmissionTicket | None = None
) -> tuple[str | None, str]:
    """Return the code and the message of the error, and check that it names the file's position."""
    with pytest.raises(HTTPError) as caught:
        await bring(media, reference, into=into)
    assert (caught.value.status, caught.value.param) == (400, reference.param)
    assert caught.value.message.startswith(f"{reference.param}: ")
    return caught.value.code, caught.value.message


def data_url(data: bytes, head: str = "image/png") -> str:
    return f"data:{head};base64,{to_base64(data)}"
