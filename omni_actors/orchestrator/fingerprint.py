"""Computes a short hash of what a request asks for, equal for equal requests.

A fingerprint covers the route, the input and the parameters. It leaves out the seed, which the system may have drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from omni_actors.orchestrator.pieces import Input
from omni_actors.orchestrator.routes import Route
from omni_actors.protocol import chunks

SAMPLES, SAMPLE_BYTES = 64, 16 * 1024
"""A buffer longer than their product is hashed in part: its length, so many samples of this size, and its end. So a
fingerprint takes a few milliseconds at most."""


def fingerprint(route: Route, inputs: Mapping[str, Sequence[Input]], params: Mapping[str, msgspec.Raw]) -> str | None:
    """Return the fingerprint of a request in hex digits, or None if the input cannot be encoded.

    Args:
        route: The stages of the request.
        inputs: Pieces by kind.
        params: The parameters for each stage, encoded with msgpack.
    """
    digest = hashlib.blake2b(digest_size=16)
    for stage in route.stages:
        share = msgspec.msgpack.decode(params[stage])
        share.pop("seed", None)
        _add(digest, memoryview(msgspec.msgpack.encode([stage, share])))
    for kind in sorted(inputs):
        for piece in inputs[kind]:
            try:
                header = chunks.ChunkHeader(request=0, source=kind, seq=0, last=False, data=dict(piece.data))
                buffers = chunks.encode(header, piece.tensors)
            except Exception:  # noqa: BLE001 - whatever the error is, the request ends with it when its input is sent
                return None
            for buffer in buffers:
                _add(digest, buffer)
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, buffer: memoryview) -> None:
    digest.update(buffer.nbytes.to_bytes(8, "little"))
    if buffer.nbytes <= SAMPLES * SAMPLE_BYTES:
        digest.update(buffer)
        return
    for at in range(0, buffer.nbytes, buffer.nbytes // SAMPLES):
        digest.update(buffer[at : at + SAMPLE_BYTES])
    digest.update(buffer[-SAMPLE_BYTES:])
