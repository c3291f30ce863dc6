"""Computes a short hash of what a request asks for, equal for equal requests.

A fingerprint covers the route, the input and the parameters. It leaves out the seed, which the system may have drawn,
and the priority, which changes no output.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from omni_actors.errors import InvalidRequest
from omni_actors.orchestrator.pieces import Input
from omni_actors.orchestrator.routes import Route
from omni_actors.protocol import chunks

SAMPLES, SAMPLE_BYTES = 64, 16 * 1024
"""A buffer longer than their product is hashed in part: its length, so many samples of this size, and its end. So a
fingerprint takes a few milliseconds at most."""


def encode_piece(piece: Input, *, request: int, source: str, seq: int, last: bool) -> list[memoryview]:
    """Return the chunk that carries a piece of input. Raises InvalidRequest if it cannot be encoded."""
    try:
        header = chunks.ChunkHeader(request=request, source=source, seq=seq, last=last, data=_by_name(piece.data))
        return chunks.on_host(chunks.encode(header, _by_name(piece.tensors)))
    except Exception as error:
        raise InvalidRequest(f"the input cannot be encoded: {error}") from error


def _by_name(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy. Raises TypeError for a name that is not text: no worker could decode it."""
    for name in given:
        if not isinstance(name, str):
            raise TypeError("the names of data and tensors must be text")
    return dict(given)


class Fingerprint:
    """The fingerprint of one request, to which live input is added piece by piece.

    Raises InvalidRequest if the input cannot be encoded.

    Args:
        route: The stages of the request.
        inputs: Pieces by kind.
        params: The parameters for each stage, encoded with msgpack.
    """

    def __init__(self, route: Route, inputs: Mapping[str, Sequence[Input]], params: Mapping[str, msgspec.Raw]) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        for stage in route.stages:
            share = msgspec.msgpack.decode(params[stage])
            for name in ("seed", "priority"):
                share.pop(name, None)
            _add(self._digest, memoryview(msgspec.msgpack.encode([stage, share])))
        for kind in sorted(inputs):
            for piece in inputs[kind]:
                self.add(kind, piece)

    def add(self, kind: str, piece: Input) -> int:
        """Add the next piece, and return its size in bytes. Raises InvalidRequest if it cannot be encoded."""
        buffers = encode_piece(piece, request=0, source=kind, seq=0, last=False)
        for buffer in buffers:
            _add(self._digest, buffer)
        return sum(buffer.nbytes for buffer in buffers)

    def hexdigest(self) -> str:
        """Return the fingerprint of what was added so far."""
        return self._digest.hexdigest()


def fingerprint(route: Route, inputs: Mapping[str, Sequence[Input]], params: Mapping[str, msgspec.Raw]) -> str | None:
    """Return the fingerprint of a request in hex digits, or None if the input cannot be encoded.

    The arguments are those of ``Fingerprint``.
    """
    try:
        return Fingerprint(route, inputs, params).hexdigest()
    except InvalidRequest:  # the request ends with this error when its input is sent
        return None


def _add(digest: hashlib.blake2b, buffer: memoryview) -> None:
    digest.update(buffer.nbytes.to_bytes(8, "little"))
    if buffer.nbytes <= SAMPLES * SAMPLE_BYTES:
        digest.update(buffer)
        return
    for at in range(0, buffer.nbytes, buffer.nbytes // SAMPLES):
        digest.update(buffer[at : at + SAMPLE_BYTES])
    digest.update(buffer[-SAMPLE_BYTES:])
