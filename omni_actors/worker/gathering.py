"""Feeding an engine: each chunk as it arrives, or a request's whole input at once.

Whole input is kept as copies, so that the rings stay free, within the bounds of ``messages.Bounds``. A request that
exceeds its own bound is refused. One that exceeds the worker's is refused for now, unless it is replayed: a death must
not refuse it, so a worker may gather more for the requests of dead ones, each within its own bound. Making its
producers wait instead could block other requests, which share their rings.
"""

from __future__ import annotations

import msgspec

from omni_actors.protocol import messages
from omni_actors.stages.base import Chunk, InvalidRequest, StageEngine, TemporarilyRefused
from omni_actors.worker.active import ActiveRequest, ActiveRequests
from ringbuf import Tensor

TOO_LARGE = "gathered_input_too_large"


class Gatherer:
    """Feeds the engine of one worker. bounds: None: chunks are fed as they arrive. active: the worker's requests."""

    def __init__(self, bounds: messages.Bounds | None, active: ActiveRequests) -> None:
        self._bounds, self._active = bounds, active

    def feed(self, engine: StageEngine, request: ActiveRequest, chunk: Chunk, size: int) -> None:
        """Feed a chunk of ``size`` bytes, or keep it; with the last one of the input, feed all.

        Raises InvalidRequest or TemporarilyRefused: the engine refuses the request, or the input exceeds the request's
        bound or the worker's. The engine has forgotten the request then.
        """
        if self._bounds is None:
            engine.feed(request.request, chunk)
            return
        copies = {name: Tensor(each.dtype, each.shape, bytes(each.data)) for name, each in chunk.tensors.items()}
        self._active.gather(request, msgspec.structs.replace(chunk, tensors=copies), size)
        if (refused := self._excess(request, self._bounds)) is not None:
            engine.abort(request.request)
            raise refused
        if request.input_complete:
            for each in self._active.take_gathered(request):
                engine.feed(request.request, each)

    def _excess(self, request: ActiveRequest, bounds: messages.Bounds) -> InvalidRequest | TemporarilyRefused | None:
        if request.gathered_bytes > bounds.request_bytes:
            limit = f"{bounds.request_bytes} bytes that a stage gathers (limits.retain_bytes)"
            return InvalidRequest(f"its input exceeds the {limit}", code=TOO_LARGE)
        if not request.replayed and self._active.gathered_bytes > bounds.worker_bytes:
            limit = f"{bounds.worker_bytes} bytes (limits.worker_retain_bytes)"
            message = f"the input that one worker gathers for all requests exceeds {limit}"
            return TemporarilyRefused(message, code=TOO_LARGE)
        return None
