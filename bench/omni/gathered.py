"""Stages that do not stream: the comparison system, with the same engines.

Each stage collects all of a request's input before its engine gets any of it, and sends all outputs after the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import msgspec

from omni_actors.stages.base import Chunk, RequestId, StageContext, StageFailure, StageOutput, StageRequest
from omni_actors.stages.registry import ENGINES
from ringbuf import Tensor

FACTORY = "bench.omni.gathered:Gathered"


class Gathered:
    """Wraps an engine. Its options are ``engine``, a name of the registry, and the options of that engine."""

    def __init__(self, context: StageContext) -> None:
        options = dict(context.options)
        spec = ENGINES[options.pop("engine")]
        assert spec.params is not None
        self._params = {field.name for field in msgspec.structs.fields(spec.params)}
        module, _, factory = spec.factory.partition(":")
        self._engine: Any = getattr(import_module(module), factory)(msgspec.structs.replace(context, options=options))
        self._chunks: dict[RequestId, list[Chunk]] = {}
        self._outputs: dict[RequestId, list[StageOutput]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._engine.busy)

    def start(self, request: StageRequest) -> None:
        # The parent does not know this engine's parameters, so it sends all parameters of the request.
        params = {name: value for name, value in request.params.items() if name in self._params}
        self._engine.start(msgspec.structs.replace(request, params=params))
        self._chunks[request.request_id] = []
        self._outputs[request.request_id] = []

    def feed(self, request_id: RequestId, chunk: Chunk) -> None:
        copies = {name: Tensor(each.dtype, each.shape, bytes(each.data)) for name, each in chunk.tensors.items()}
        self._chunks[request_id].append(msgspec.structs.replace(chunk, tensors=copies))
        if chunk.last:
            for each in self._chunks.pop(request_id):
                self._engine.feed(request_id, each)

    def abort(self, request_id: RequestId) -> None:
        self._engine.abort(request_id)
        self._chunks.pop(request_id, None)
        self._outputs.pop(request_id, None)

    def step(self) -> Iterator[StageOutput | StageFailure]:
        for output in self._engine.step():
            if isinstance(output, StageFailure):
                yield output
                continue
            self._outputs[output.request_id].append(output)
            if output.last:
                yield from self._outputs.pop(output.request_id)

    def close(self) -> None:
        self._engine.close()
