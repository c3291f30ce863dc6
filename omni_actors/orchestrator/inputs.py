"""Sends a request's input into the pipeline. The input is the client's: any of it may be invalid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import trio

from omni_actors.errors import InvalidRequest
from omni_actors.orchestrator.replay_state import Phase
from omni_actors.orchestrator.request import Request
from omni_actors.protocol import chunks
from omni_actors.protocol.messages import CLIENT, MAX_BYTES
from omni_actors.supervisor.edges import Edges

PARAMS_BYTES = MAX_BYTES // 2
"""Largest encoded size of a request's parameters for one stage: they travel in one control message."""


def encode_params(params: Mapping[str, Mapping[str, Any]]) -> dict[str, msgspec.Raw]:
    """Encode the parameters of each stage, once for all its ``Start`` messages.

    Raises InvalidRequest if they cannot be encoded or do not fit into a control message.
    """
    encoded: dict[str, msgspec.Raw] = {}
    for stage, share in params.items():
        try:
            encoded[stage] = msgspec.Raw(msgspec.msgpack.encode(share))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidRequest(f"the parameters of stage {stage!r} cannot be encoded: {error}") from error
        if (size := len(encoded[stage])) > PARAMS_BYTES:
            raise InvalidRequest(f"the parameters of stage {stage!r} take {size} bytes; the limit is {PARAMS_BYTES}")
    return encoded


async def send_input(request: Request, stage: str, edges: Edges) -> None:
    """Send a stage its part of the input, from the first piece on, all of it to one incarnation.

    Returns early if the incarnation dies, or has not confirmed a repeated ``Start`` yet: the stage is sent its whole
    input when it has. Raises InvalidRequest if a piece cannot be encoded. Cancellation: some pieces may be sent.
    """
    progress = request.replay_state.stages[stage]
    address = progress.address
    edge = edges.inputs.get(address) if address else None
    if edge is None or progress.phase is Phase.RESTARTING:
        return
    assert request.number is not None, "it is placed"
    pieces = [piece for kind in request.route.entries[stage] for piece in request.inputs[kind]]
    for seq, piece in enumerate(pieces):
        if seq:
            await trio.lowlevel.checkpoint()  # other tasks run between pieces; the first piece is sent at once
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        try:
            header = chunks.ChunkHeader(
                request=request.number, source=CLIENT, seq=seq, last=seq == len(pieces) - 1, data=dict(piece.data)
            )
            buffers = chunks.encode(header, piece.tensors)
        except Exception as error:
            raise InvalidRequest(f"the input cannot be encoded: {error}") from error
        try:
            await edge.send(buffers)
        except trio.ClosedResourceError:
            return
        size = sum(buffer.nbytes for buffer in buffers)
        request.sent_bytes[str(address)] = request.sent_bytes.get(str(address), 0) + size
