"""An echo engine that refuses its first requests for now."""

from __future__ import annotations

from typing import Any

import msgspec

from omni_actors.stages.base import StageContext, StageRequest, TemporarilyRefused
from omni_actors.stages.echo.engine import EchoEngine
from omni_actors.stages.echo.options import EchoOptions


class RefusingEngine(EchoEngine):
    """The option ``refusals`` says how many starts are refused; the other options are those of the echo engine."""

    def __init__(self, context: StageContext) -> None:
        options: dict[str, Any] = dict(context.options)
        self._refusals = int(options.pop("refusals"))
        complete = msgspec.to_builtins(msgspec.convert(options, EchoOptions))
        super().__init__(msgspec.structs.replace(context, options=complete))

    def start(self, request: StageRequest) -> None:
        if self._refusals:
            self._refusals -= 1
            raise TemporarilyRefused("there is no room", code="no_room")
        super().start(request)
