"""Engines without models for pipelines in the shape of real ones. Workers import this module by name.

Speaker: each word of ``text`` is a chunk of ``WORD_S`` seconds at ``RATE`` Hz, all ``LEVEL``, and takes ``step_s``.
"hush" has no sound, nor has "endless", and an answer with that never ends. "unspeakable" is refused, "later" is refused
for now every other time, and "deadly" ends the worker with ``LAST_LINES`` on stderr.
Mute: refuses every text that a client wants to hear, at its end, with the error code of the option ``refusal``.
Ear: a recording's transcript is its length and its rate, in words; after a comma, the task and the prompt that it was
given. It is one segment, with the times that it was asked for. It knows no language "xx", and refuses a recording of
``REFUSED_S``.
Eye: writes what reaches it, a JSON object a line: the request's parameters, each file's digest, the conversation. It
refuses an image that is "unsightly".
HeldEye, HeldEar: keep their last piece until the file of the option "until" is there. HeldPainter keeps its picture.
The file of the option "waits" says that they have all of a request and wait.
Inside: writes the arguments, the environment and the ``sitecustomize`` module of its process, as JSON.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from omni_actors.stages.base import Chunk, InvalidRequest, StageContext, StageOutput, StageRequest, TemporarilyRefused
from omni_actors.stages.engine import PausableEngine
from omni_actors.stages.sources import OpenSources
from tests.support.painting_engine import PaintingEngine

RATE = 16000
WORD_S = 0.1
LEVEL = 0.5
WORDLESS = "no words"
"""With this prompt, ``Ear`` finds no words."""
REFUSED_S = 0.3
LAST_LINES = [f"words of the worker, {number}\n" for number in range(30)]


class _Work(msgspec.Struct):
    open: OpenSources
    pieces: deque[Any] = msgspec.field(default_factory=deque)
    paused: bool = False
    endless: bool = False

    @property
    def is_over(self) -> bool:
        return not (self.open or self.pieces or self.endless)

    @property
    def ready(self) -> bool:
        return not self.paused and bool(self.pieces or self.is_over)


class _Engine(PausableEngine[_Work]):
    def __init__(self, context: StageContext) -> None:
        super().__init__()
        self._step_s = context.options.get("step_s", 0.0)

    def _new_request(self, request: StageRequest) -> _Work:
        return _Work(OpenSources(request.sources))

    def _take(self, request: _Work, chunk: Chunk) -> None:
        request.pieces.extend(self._pieces(chunk))
        request.open.update(chunk)

    def step(self) -> Iterator[StageOutput]:
        time.sleep(self._step_s)
        for request_id, work in list(self._requests.items()):
            if work.ready and not self._is_held(work):
                tensors, data = work.pieces.popleft() if work.pieces else ({}, {})
                if last := work.is_over:
                    del self._requests[request_id]
                yield StageOutput(request_id, tensors, data, last)

    def _is_held(self, work: _Work) -> bool:
        return False

    def _pieces(self, chunk: Chunk) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        raise NotImplementedError


class Speaker(_Engine):
    _takes_later = False

    def _take(self, request: _Work, chunk: Chunk) -> None:
        request.endless |= "endless" in chunk.data.get("text", "").split()
        super()._take(request, chunk)

    def _pieces(self, chunk: Chunk) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        for word in chunk.data.get("text", "").split():
            if word == "unspeakable":
                raise InvalidRequest("this text cannot be spoken", param="script")
            if word == "later":
                self._takes_later = not self._takes_later
                if self._takes_later:
                    raise TemporarilyRefused("this cannot be spoken yet", code="too_early")
            if word == "deadly":
                os.write(2, "".join(LAST_LINES).encode())
                os._exit(3)
            if word in ("hush", "endless"):
                continue
            yield {"audio": np.full(round(RATE * WORD_S), LEVEL, np.float32)}, {"sample_rate": RATE}


class Mute(_Engine):
    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._code = context.options["refusal"]

    def _pieces(self, chunk: Chunk) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        if chunk.last:
            raise InvalidRequest("there is nothing to speak", param="input", code=self._code)
        return iter(())


class Ear(_Engine):
    def _new_request(self, request: StageRequest) -> _Work:
        if request.params.get("language") == "xx":
            raise InvalidRequest("language: there is no language 'xx'", param="language")
        self._params = request.params
        return super()._new_request(request)

    def _pieces(self, chunk: Chunk) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        if "audio" in chunk.tensors:
            rate = chunk.data["sample_rate"]
            [samples] = chunk.tensors["audio"].shape
            if samples == round(REFUSED_S * rate):
                raise InvalidRequest("this recording is refused", param="audio")
            given = [self._params[name] for name in ("task", "initial_prompt") if name in self._params]
            text = "" if WORDLESS in given else ", ".join([f"{samples / rate:.1f} s at {rate} Hz", *given])
            data = {"text": text, "index": chunk.data["index"]}
            if timestamps := self._params.get("timestamps"):
                decoded = {"tokens": [1], "temperature": 0.0, "avg_logprob": -0.5}
                decoded |= {"compression_ratio": 1.0, "no_speech_prob": 0.0}
                data["segment"] = {"start": 0.0, "end": samples / rate, **decoded}
                if timestamps == "word":
                    data["segment"]["words"] = [{"word": " all", "start": 0.0, "end": samples / rate}]
                data["language"] = "en"
            yield {}, data


class Eye(_Engine):
    def _new_request(self, request: StageRequest) -> _Work:
        return _Work(OpenSources(request.sources), deque([_line({"params": request.params})]))

    def _pieces(self, chunk: Chunk) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        for name, tensor in chunk.tensors.items():
            data = bytes(tensor.numpy())
            if data == b"unsightly":
                raise InvalidRequest("image: this image is refused", param="image")
            yield _line({name: chunk.data["index"], "digest": hashlib.sha256(data).hexdigest()})
        if "messages" in chunk.data:
            yield _line({"messages": chunk.data["messages"]})


class Strict(Eye):
    """Refuses a conversation in which one side speaks twice in a row, as some chat templates do."""

    def _pieces(self, chunk: Chunk) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        roles = [message["role"] for message in chunk.data.get("messages", ())]
        if any(one == other for one, other in pairwise(roles)):
            raise InvalidRequest("the chat template refuses the conversation", param="messages")
        return super()._pieces(chunk)


class _Held(_Engine):
    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._until, self._waits = Path(context.options["until"]), Path(context.options["waits"])

    def _is_held(self, work: _Work) -> bool:
        if len(work.pieces) > 1 or self._until.exists():
            return False
        if not work.open:
            self._waits.touch()
        return True


class HeldEye(_Held, Eye):
    """``Eye``, held."""


class HeldEar(_Held, Ear):
    """``Ear``, held."""


class HeldPainter(PaintingEngine):
    """``PaintingEngine``, held."""

    def __init__(self, context: StageContext) -> None:
        self._until, self._waits = Path(context.options.pop("until")), Path(context.options.pop("waits"))
        super().__init__(context)

    def step(self) -> Iterator[StageOutput]:
        if self._until.exists():
            yield from super().step()
        else:
            self._waits.touch()
            time.sleep(0.01)


class Inside(_Engine):
    def _pieces(self, chunk: Chunk) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        hooks = getattr(sys.modules.get("sitecustomize"), "__file__", None)
        yield _line({"arguments": sys.argv, "environment": dict(os.environ), "hooks": hooks})


def _line(found: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return {}, {"text": msgspec.json.encode(found).decode() + "\n"}


def waiting_for_weights(context: StageContext) -> Eye:
    """Load if the file of the option "weights" is there."""
    Path(context.options["weights"]).read_bytes()
    return Eye(context)


def broken(context: StageContext) -> _Engine:
    raise OSError("the weights of this model are not there")
