"""Load the files of a request: from its body (base64, data: URLs), or from URLs that the operator allows.

Rules
1. The loader does not look into files: they are bytes.
2. A request's body and the files that its URLs name share one limit (``max_body_bytes``), and the files count in the
   budget of all arriving requests: a URL costs as much as its file in the body would.
3. All files of a request must arrive within ``LOAD_TIMEOUT_S``; otherwise the request is refused.
4. Every failure is an HTTPError that names the file's position in the request, with OpenAI's codes.
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
"""The most files of one request."""
_AT_A_TIME = 4
"""How many files of one request are loaded at the same time."""
_MAX_HEAD = 256
"""The most characters before the data of a data: URL."""
_INVALID = "invalid_{}_url"


class MediaReference(msgspec.Struct, frozen=True):
    """A file that a request contains or names. param: its position in the request."""

    kind: Literal["audio", "image", "video"]
    source: str
    param: str
    is_base64: bool = False
    """Whether the source is the file in base64, and no URL."""


class MediaLoader:
    """Loads files. By default only files in the request's body are allowed.

    Args:
        domains: the allowed hosts of http(s) URLs; see ``Fetcher``.
        folders: the folders below which file: URLs may name files.
        may_connect: whether the server may connect to an address.

    Raises ValueError for an argument that is not a domain, or not a folder.
    """

    def __init__(
        self,
        domains: Iterable[str] = (),
        folders: Iterable[str | Path] = (),
        *,
        may_connect: Callable[[Address], bool] = is_public,
    ) -> None:
        self._fetcher, self._folders = Fetcher(domains, may_connect), AllowedFolders(folders)

    async def load(self, references: Sequence[MediaReference], ticket: AdmissionTicket) -> list[bytes]:
        """Return the content of each file, in order. The ticket counts their bytes. Raises HTTPError."""
        if len(references) > MAX_FILES:
            message = f"messages: {len(references)} files; a request may have {MAX_FILES}"
            raise bad_request(message, "messages", "too_many_files")
        files = [b""] * len(references)
        failure: HTTPError | None = None
        at_a_time = trio.CapacityLimiter(_AT_A_TIME)

        async def load_one(index: int) -> None:
            nonlocal failure
            reference = references[index]
            try:
                async with at_a_time:
                    files[index] = await self._read(reference, ticket)
                return
            except HTTPError as error:
                failure = failure or error  # raised below, outside the nursery's exception group
            except MediaUnavailable as error:
                message, code = f"{reference.param}: {error.reason}", error.code.format(reference.kind)
                failure = failure or bad_request(message, reference.param, code)
            nursery.cancel_scope.cancel()

        with trio.move_on_after(LOAD_TIMEOUT_S) as loading:
            async with trio.open_nursery() as nursery:
                for index in range(len(references)):
                    nursery.start_soon(load_one, index)
        if failure is not None:
            raise failure
        if loading.cancelled_caught:
            message = f"messages: their files did not arrive within {LOAD_TIMEOUT_S:g} s"
            raise bad_request(message, "messages", "files_too_slow")
        return files

    async def _read(self, reference: MediaReference, ticket: AdmissionTicket) -> bytes:
        """Raises MediaUnavailable, HTTPError."""

        def add_bytes(size: int) -> None:
            if ticket.bytes + size > ticket.max_bytes:
                reason = f"the request and the files that it names are larger than {ticket.max_bytes} bytes"
                raise MediaUnavailable(reason, "{}_file_too_large")
            ticket.add_bytes(size)

        kind, source = reference.kind, reference.source
        if reference.is_base64:
            return await from_base64(source, reference.param)
        match source[:_MAX_HEAD].partition(":")[0].lower():
            case "data":
                data = await from_base64(source, reference.param, _data_begin(kind, source))
            case "http" | "https":
                data = await self._fetcher.fetch(source, add_bytes)
            case "file":
                data = await self._folders.read(_path(source), add_bytes)
            case _:
                accepted = "a data: URL; http:, https: and file: if the server allows them"
                raise MediaUnavailable(f"unsupported URL; accepted: {accepted}", _INVALID)
        if not data:
            raise MediaUnavailable("the file is empty", "empty_{}_file")
        return data


def _data_begin(kind: str, url: str) -> int:
    """Return the position of the base64 in a data: URL. Raises MediaUnavailable."""
    comma = url.find(",", 0, _MAX_HEAD)
    media_type, *rest = url[len("data:") : max(comma, 0)].lower().split(";")
    if rest[-1:] != ["base64"]:
        raise MediaUnavailable(f"this is not a data: URL in base64; accepted: data:{kind}/…;base64,…", _INVALID)
    if not media_type.startswith(f"{kind}/"):
        raise MediaUnavailable(f"its media type is not {kind}/…", "unsupported_{}_media_type")
    return comma + 1


def _path(url: str) -> str:
    """Return the path of a file: URL. Raises MediaUnavailable."""
    parts = split_url(url)
    if parts.netloc.lower() not in ("", "localhost") or parts.query or parts.fragment:
        raise MediaUnavailable("a file: URL has a path and nothing else: file:///folder/file", _INVALID)
    return os.fsdecode(unquote_to_bytes(parts.path))
