"""The files of a request: in its body (base64, data: URLs), or where its URLs say, if the operator allows that.

Rules
1. Nothing here looks into them: they are bytes.
2. A request's body and the files that its URLs name share one limit (``max_body_bytes``), and all that arrive share the
   budget of ``arrivals``: a reference costs what its file would.
3. All files of a request are here within ``LOAD_TIMEOUT_S``, or the request is refused.
4. What is wrong with one is a HTTPError that names its place in the request, with OpenAI's codes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import unquote_to_bytes

import msgspec
import trio

from omni_actors.serve.access.admission import AdmissionTicket
from omni_actors.serve.http.errors import HTTPError, bad_request
from omni_actors.serve.media.base64_data import from_base64
from omni_actors.serve.media.fetch import Address, Fetcher, MediaUnavailable, is_public, split_url
from omni_actors.serve.media.folders import AllowedFolders

LOAD_TIMEOUT_S = 30.0
MAX_FILES = 128
"""Of one request."""
_AT_A_TIME = 4
"""Of one request."""
_MAX_HEAD = 256
"""Characters before a data: URL's data."""
_INVALID = "invalid_{}_url"


class MediaReference(msgspec.Struct, frozen=True):
    """A file that a request names. param: where it does."""

    kind: Literal["audio", "image", "video"]
    source: str
    """A URL; of audio, base64."""
    param: str


class MediaLoader:
    """Where the files of requests may come from, beside their bodies: nowhere, unless it is said here.

    domains: of http(s) URLs, as ``Fetcher`` has them. folders: file: URLs may name what is below. may_connect: the
    addresses that the names of hosts may lead to. Raises ValueError for a domain or a folder that is none.
    """

    def __init__(
        self,
        domains: Iterable[str] = (),
        folders: Iterable[str | Path] = (),
        *,
        may_connect: Callable[[Address], bool] = is_public,
    ) -> None:
        self._fetcher, self._folders = Fetcher(domains, may_connect), AllowedFolders(folders)

    async def bring(self, references: Sequence[MediaReference], ticket: AdmissionTicket) -> list[bytes]:
        """The files, in order. Raises HTTPError."""
        if len(references) > MAX_FILES:
            message = f"messages: {len(references)} files; a request may bring {MAX_FILES}"
            raise bad_request(message, "messages", "too_many_files")
        files = [b""] * len(references)
        problem: HTTPError | None = None
        at_a_time = trio.CapacityLimiter(_AT_A_TIME)

        async def bring_one(place: int) -> None:
            nonlocal problem
            try:
                async with at_a_time:
                    files[place] = await self._bring_one(references[place], ticket)
            except HTTPError as error:
                problem = problem or error  # raised below as it is, not inside the nursery's exception group
                nursery.cancel_scope.cancel()

        with trio.move_on_after(LOAD_TIMEOUT_S) as time:
            async with trio.open_nursery() as nursery:
                for place in range(len(references)):
                    nursery.start_soon(bring_one, place)
        if problem is not None:
            raise problem
        if time.cancelled_caught:
            message = f"messages: the files that they name did not come within {LOAD_TIMEOUT_S:g} s"
            raise bad_request(message, "messages", "files_too_slow")
        return files

    async def _bring_one(self, reference: MediaReference, ticket: AdmissionTicket) -> bytes:
        """Raises HTTPError."""
        try:
            return await self._obtain(reference, ticket)
        except MediaUnavailable as error:
            code = error.code.format(reference.kind)
            raise bad_request(f"{reference.param}: {error.reason}", reference.param, code) from error

    async def _obtain(self, reference: MediaReference, ticket: AdmissionTicket) -> bytes:
        """Raises MediaUnavailable, HTTPError."""

        def hold(size: int) -> None:
            if ticket.bytes + size > ticket.max_bytes:
                reason = f"the request and the files that it names are larger than {ticket.max_bytes} bytes"
                raise MediaUnavailable(reason, "{}_file_too_large")
            ticket.hold(size)

        kind, source = reference.kind, reference.source
        if kind == "audio":
            return await from_base64(source, reference.param)
        match source[:_MAX_HEAD].partition(":")[0].lower():
            case "data":
                data = await from_base64(source, reference.param, _begin_of_data(kind, source))
            case "http" | "https":
                data = await self._fetcher.fetch(source, hold)
            case "file":
                data = await self._folders.read(_path(source), hold)
            case _:
                accepted = "a data: URL, or http:, https: and file: where the server allows them"
                raise MediaUnavailable(f"this is not a URL that a file can have; accepted: {accepted}", _INVALID)
        if not data:
            raise MediaUnavailable("there is nothing in it", "empty_{}_file")
        return data


def _begin_of_data(kind: str, url: str) -> int:
    """Where in a data: URL its base64 begins. Raises MediaUnavailable."""
    comma = url.find(",", 0, _MAX_HEAD)
    media_type, *rest = url[len("data:") : max(comma, 0)].lower().split(";")
    if rest[-1:] != ["base64"]:
        raise MediaUnavailable(f"this is not a data: URL in base64; accepted: data:{kind}/…;base64,…", _INVALID)
    if not media_type.startswith(f"{kind}/"):
        raise MediaUnavailable(f"its media type is not {kind}/…", "unsupported_{}_media_type")
    return comma + 1


def _path(url: str) -> str:
    """Raises MediaUnavailable."""
    parts = split_url(url)
    if parts.netloc.lower() not in ("", "localhost") or parts.query or parts.fragment:
        raise MediaUnavailable("a file: URL has a path and nothing else: file:///folder/file", _INVALID)
    return os.fsdecode(unquote_to_bytes(parts.path))
