"""What a client brings, on its way into a pipeline: it is somebody else's, so anything may be wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import trio

from omni_actors.errors import InvalidRequest
from omni_actors.orchestrator.request import Request
from omni_actors.protocol import chunks
from omni_actors.protocol.chunks import ChunkHeader
from omni_actors.protocol.messages import CLIENT, MAX_BYTES
from omni_actors.supervisor.edges import Edges

PARAMS_BYTES = MAX_BYTES // 2
"""Largest parameters of a request at one stage, encoded: they travel in one control message."""


def encode_params(params: Mapping[str, Mapping[str, Any]]) -> dict[str, msgspec.Raw]:
    """Encode the parameters of each stage, once for all its ``Start`` messages.

    Raises InvalidRequest if they cannot be encoded or do not fit into a control message.
    """
    encoded: dict[str, msgspec.Raw] = {}
    for stage, share in params.items():
        try:
            encoded[stage] = msgspec.Raw(msgspec.msgpack.encode(share))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidRequest(f"parameters of stage {stage!r} that cannot be sent: {error}") from error
        if (size := len(encoded[stage])) > PARAMS_BYTES:
            raise InvalidRequest(f"parameters of stage {stage!r} take {size} bytes; the limit is {PARAMS_BYTES}")
    return encoded


async def send_input(request: Request, stage: str, edges: Edges) -> None:
    """Send a stage its part of the input, from the first piece on, all of it to one incarnation.

    Returns early where that one dies: the next one is fed when it has started. Raises InvalidRequest.
    """
    address = request.placement.get(stage)
    edge = edges.inputs.get(address) if address else None
    if edge is None or stage in request.starting:  # nothing overtakes its ``Start``
        return
    assert request.number is not None, "it is placed"
    pieces = [piece for kind in request.route.entries[stage] for piece in request.inputs[kind]]
    for seq, piece in enumerate(pieces):
        if seq:
            await trio.lowlevel.checkpoint()  # everybody else has a turn; the first piece goes out in this one
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        try:
            header = ChunkHeader(request.number, CLIENT, seq, seq == len(pieces) - 1, dict(piece.data))
            buffers = chunks.encode(header, piece.tensors)
        except Exception as error:
            raise InvalidRequest(f"input that cannot be sent: {error}") from error
        try:
            await edge.send(buffers)
        except trio.ClosedResourceError:
            return
        size = sum(buffer.nbytes for buffer in buffers)
        request.sent_bytes[str(address)] = request.sent_bytes.get(str(address), 0) + size
