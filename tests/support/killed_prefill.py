"""Engines of prefill and of decode whose workers end by SIGKILL at a place of a request.

The option ``plan`` names a file: JSON, a list of [place, number]. Places: "feed" (before a chunk with this number is
taken) and "output" (behind the output with this number). An entry is removed before the process ends.

They are for one request at a time.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from omni_actors.stages.base import Chunk, StageContext, StageOutput, StageRequest
from omni_actors.stages.registry import ENGINES


def make(context: StageContext) -> Any:
    """Return the engine of the option ``engine``, which kills its process by the option ``plan``."""
    options = dict(context.options)
    plan = Path(options.pop("plan"))
    spec = ENGINES[options.pop("engine")]
    module, name = spec.factory.split(":")
    complete = msgspec.to_builtins(msgspec.convert(options, spec.options))
    return _Killing(
        getattr(import_module(module), name)(msgspec.structs.replace(context, options=complete)), plan, spec.params
    )


class _Killing:
    """A ``StageEngine`` that passes all calls on. schema: of the request's parameters."""

    def __init__(self, engine: Any, plan: Path, schema: Any) -> None:
        self._engine, self._plan, self._schema = engine, plan, schema
        self._outputs = 0
        self.abort, self.close = engine.abort, engine.close

    @property
    def busy(self) -> bool:
        return bool(self._engine.busy)

    def start(self, request: StageRequest) -> None:
        self._outputs = 0
        known = {name: value for name, value in request.params.items() if name in self._schema.__struct_fields__}
        self._engine.start(msgspec.structs.replace(request, params=known))

    def feed(self, request_id: int, chunk: Chunk) -> None:
        self._kill("feed", chunk.seq)
        self._engine.feed(request_id, chunk)

    def step(self) -> Iterator[Any]:
        for output in self._engine.step():
            yield output
            if isinstance(output, StageOutput):
                self._kill("output", self._outputs)
                self._outputs += 1

    def _kill(self, place: str, number: int) -> None:
        plan = json.loads(self._plan.read_text())
        if [place, number] in plan:
            self._plan.write_text(json.dumps([entry for entry in plan if entry != [place, number]]))
            os.kill(os.getpid(), signal.SIGKILL)
