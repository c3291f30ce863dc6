"""The whisper engine, which logs the windows that it decodes, and stops its process behind an output.

Options, besides those of the engine: ``log``, a file that gets a line for each window, with the process's id and the
frame at which the window begins; and ``plan``, a file that a test writes: the number of the output, from 1, behind
which the process stops itself (SIGSTOP), so that the test can kill it there. The process empties the file first.

It is for one request at a time.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from omni_actors.stages.base import StageContext, StageRequest
from omni_actors.stages.whisper.engine import WhisperEngine
from omni_actors.stages.whisper.options import WhisperOptions, WhisperParams


class StoppingWhisper(WhisperEngine):
    """See the module."""

    def __init__(self, context: StageContext) -> None:
        options = dict(context.options)
        self._log, self._plan = Path(options.pop("log")), Path(options.pop("plan"))
        complete = msgspec.to_builtins(msgspec.convert(options, WhisperOptions))
        super().__init__(msgspec.structs.replace(context, options=complete))
        from omni_actors.stages.whisper.windows import Transcription

        next_window = Transcription.next_window

        def logged(transcription: Transcription) -> Any:
            seek = transcription.place.seek
            found = next_window(transcription)
            if found is not None:
                with self._log.open("a") as log:
                    log.write(f"{os.getpid()} {seek}\n")
            return found

        Transcription.next_window = logged  # type: ignore[method-assign]

    def start(self, request: StageRequest) -> None:
        self._outputs = 0
        known = {name: value for name, value in request.params.items() if name in WhisperParams.__struct_fields__}
        super().start(msgspec.structs.replace(request, params=known))

    def step(self) -> Iterator[Any]:
        for output in super().step():
            self._outputs += 1
            stops = self._plan.read_text() == str(self._outputs)
            if stops:  # before the test has the output, and kills
                self._plan.write_text("")
            yield output
            if stops:
                # Sent to the process, the signal may go to another thread, and this one would send more meanwhile.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
