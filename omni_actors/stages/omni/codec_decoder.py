"""What the codec decoders of omni models share: frames of codes to sound, while the frames arrive.

A frame is what a talker makes in one step: one number (a code) of each group.

Input: tensors ``codes``, an integer array (n, groups): n frames, n > 0. A chunk without tensors only ends the input.

Output: tensors ``audio``, float32 (n,); data ``sample_rate`` (24000 Hz). The end of the input causes the request's last
output, which may have no audio. The cuts between outputs depend on the number of frames alone, not on their timing.

The decoders decide nothing. With ``StageRequest.needed_from``, a decoder passes over the frames that the first needed
samples do not depend on, and puts out earlier samples as empty outputs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from omni_actors.stages.base import Chunk, InvalidRequest, StageOutput, StageRequest
from omni_actors.stages.engine import PausableEngine
from omni_actors.stages.sources import OpenSources

SAMPLE_RATE = 24_000
WHOLE_INPUT = (sys.maxsize,)
"""The chunk sizes of a request whose frames are decoded together, once all have arrived."""


class CodecRequest:
    """One request.

    chunk_sizes: frames in the first chunk, in the second, and so on; the last is for all more. skip: how many chunks
    are passed over, at most ``request.needed_from``.
    """

    def __init__(self, request: StageRequest, chunk_sizes: Sequence[int], skip: int) -> None:
        self.id, self.needed_from = request.request_id, request.needed_from
        self.open = OpenSources(request.sources)
        self.received = self.chunks = self.outputs = 0
        """Frames that have arrived, chunks taken, and outputs made."""
        self.skip = skip
        self.skipped: list[Tensor] = []
        """The frames of the first ``skip`` chunks."""
        self.paused = False
        self._chunk_sizes = chunk_sizes
        self._waiting: list[Tensor] = []
        self._size = 0
        """Frames in all of ``_waiting``."""

    def add(self, codes: Tensor) -> None:
        """Add the codes of n frames, int64 (groups, n)."""
        self._waiting.append(codes)
        self._size += codes.shape[1]
        self.received += codes.shape[1]

    @property
    def next_chunk(self) -> tuple[int, bool] | None:
        """The number of frames of the next chunk, and whether it is the last. None: there is none to decode now."""
        if self.paused:
            return None
        due = self._chunk_sizes[min(self.chunks, len(self._chunk_sizes) - 1)]
        if self._size >= due:
            return due, False
        return None if self.open else (self._size, True)

    @property
    def ready(self) -> bool:
        return self.next_chunk is not None

    def take(self, size: int) -> Tensor:
        """Take the codes of the next ``size`` frames, int64 (groups, size)."""
        codes = torch.cat(self._waiting, -1)
        self._waiting = [codes[:, size:]]
        self._size -= size
        self.chunks += 1
        return codes[:, :size]


C = TypeVar("C", bound=CodecRequest)


class CodecDecoder(PausableEngine[C]):
    """The input and output sides of a codec decoder. A subclass has ``_new_request`` and ``step``.

    groups: codes in one frame. codebook: each is less than this. longest: the most frames of a request.
    """

    def __init__(self, groups: int, codebook: int, longest: int = sys.maxsize) -> None:
        super().__init__()
        self._groups, self._codebook, self._longest = groups, codebook, longest

    def _take(self, request: C, chunk: Chunk) -> None:
        if chunk.tensors:
            request.add(self._checked(chunk, request.received))
        request.open.update(chunk)

    def _checked(self, chunk: Chunk, before: int) -> Tensor:
        """Return a copy of the codes, int64 (groups, n). before: frames that arrived earlier. Raises InvalidRequest."""
        codes = chunk.tensors.get("codes")
        if codes is None or not codes.dtype.startswith(("int", "uint")):
            raise _refusal(f"codes, integers, were expected, not {sorted(chunk.tensors)}")
        if len(codes.shape) != 2 or codes.shape[0] < 1 or codes.shape[1] != self._groups:
            raise _refusal(f"codes of shape (n, {self._groups}) were expected, not {codes.shape}")
        copied = codes.numpy().T.astype(np.int64, order="C")
        if copied.min() < 0 or copied.max() >= self._codebook:
            raise _refusal(f"codes from 0 to {self._codebook - 1} were expected, not {copied.min()} to {copied.max()}")
        if before + copied.shape[1] > self._longest:
            raise _refusal(f"{self._longest} codes at most were expected, not {before + copied.shape[1]}")
        return torch.from_numpy(copied)

    def _skip(self) -> Iterator[StageOutput]:
        """Pass over the chunks that are there and of which no samples are needed: an empty output for each."""
        for request in list(self._requests.values()):
            while request.chunks < request.skip and (chunk := request.next_chunk):
                size, last = chunk
                if size:
                    request.skipped.append(request.take(size))
                yield self._output(request, torch.empty(0), last=last)
                if last:
                    break

    def _output(self, request: C, wave: Tensor, *, last: bool) -> StageOutput:
        """Return an output with this sound, float (n,). last: it ends the request, which the engine then forgets."""
        if last:
            del self._requests[request.id]
        audio = wave.float().cpu().numpy().copy()  # a view would keep the sound of a whole batch alive
        tensors, data = {"audio": audio} if len(audio) else {}, {"sample_rate": SAMPLE_RATE}
        partial, request.outputs = request.outputs < request.needed_from, request.outputs + 1
        return StageOutput(request.id, tensors, data, last, partial=partial)


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="codes")
