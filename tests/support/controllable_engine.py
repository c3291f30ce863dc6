"""The echo engine with a few capabilities, for tests of calls."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from omni_actors.stages.base import InvalidRequest, StageContext
from omni_actors.stages.echo.engine import EchoEngine

FACTORY = f"{__name__}:ControllableEcho"
SLEEPING_FACTORY = f"{__name__}:SleepingEcho"
SLEEPING_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class _Key:
    """It can be encoded as a key, and cannot be decoded as one."""

    number: int


class ControllableEcho(EchoEngine):
    """Remembers notes by name, and fails on request. A note may be the path of a file that has it.

    New weights with the version "poison", or with the path of a file that exists, end the worker.
    """

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._notes: dict[str, str] = {}
        self._capabilities |= {
            "note": self._note,
            "notes": lambda: {"pid": os.getpid(), "notes": self._notes},
            "active": lambda: sorted(self._requests),
            "large": lambda size: "x" * size,
            "itself": lambda: self,
            "keyed": lambda: {_Key(1): 1},
            "huge": lambda: 2**64,
            "crash": self._crash,
            "tokenize": lambda prompt, **more: {"tokens": [1], "token_strs": [prompt], "max_model_len": 8},
            "sleep": "there is nothing to offload",
            "update_weights": self._take_weights,
        }

    def _note(self, name: str, text: str) -> str:
        if not text:
            raise InvalidRequest("an empty note", param="text")
        if text.startswith("/"):
            text = Path(text).read_text()
        self._notes[name] = text
        return text

    def _take_weights(self, files: Mapping[str, tuple[int, int]], version: str | None) -> dict[str, Any]:
        if version == "poison" or (version and version.startswith("/") and Path(version).exists()):
            raise RuntimeError("the weights asked for a crash")
        if version == "large":  # as the kernel does when memory runs out
            os.kill(os.getpid(), signal.SIGKILL)
        return {**self._update_weights(files, version), "complete": version != "part"}

    def _crash(self) -> Any:
        raise RuntimeError("the call asked for a crash")


class BrittleEcho(ControllableEcho):
    """Loads only while the file of its option ``needs`` exists."""

    def __init__(self, context: StageContext) -> None:
        options = dict(context.options)
        Path(options.pop("needs")).read_text()
        super().__init__(msgspec.structs.replace(context, options=options))


class SleepingEcho(ControllableEcho):
    """Frees a large block of memory while it sleeps."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._weights = bytearray(b"w" * SLEEPING_BYTES)
        self._capabilities |= {"sleep": self._sleep, "wake_up": self._wake_up}

    def _sleep(self, level: int) -> None:
        self._weights = bytearray()

    def _wake_up(self, tags: list[str] | None) -> bool:
        self._weights = bytearray(b"w" * SLEEPING_BYTES)
        return True
