"""Qwen3-Omni's code2wav on transformers: codec frames to a waveform, while the frames arrive.

Input: tensors ``codes``, an integer array (frames, groups) of at least one frame, the groups in the talker's order. A
chunk without tensors only ends the input.

Output: tensors ``audio``, float32 (n,); data ``sample_rate`` (24000 Hz). The end of the input causes the request's last
output, which has the rest and may have no audio. So the cuts between outputs depend on the number of frames alone, not
on when they arrived.
- ``decode`` "exact": the samples are those of the model's forward over all frames (to 1e-4 in float32). They come in
  chunks of ``chunk_frames``, the first ones small, so that speech starts early.
- ``decode`` "reference": the samples are those of transformers' ``chunked_decode`` once all frames have arrived, equal
  to the bit if a forward has one request.

A step decodes one chunk of every request that has one. Chunks of the same length share a forward, up to ``max_batch``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omni_actors.stages.base import Chunk, InvalidRequest, RequestId, StageContext, StageOutput, StageRequest
from omni_actors.stages.checkpoint import load_part
from omni_actors.stages.engine import PausableEngine
from omni_actors.stages.qwen3.options import Code2WavOptions
from omni_actors.stages.qwen3.streaming import DecoderState, StreamingDecoder
from omni_actors.stages.sources import OpenSources

SAMPLE_RATE = 24_000


class _Request:
    """One request."""

    def __init__(self, request: StageRequest) -> None:
        self.open = OpenSources(request.sources)
        self.pending: list[torch.Tensor] = []
        """Frames that wait to be decoded, int64 (groups, n) each."""
        self.frames = 0
        """Frames in all of ``pending``."""
        self.chunks = 0
        """Chunks decoded so far."""
        self.state = DecoderState()
        self.paused = False

    def next_chunk(self, options: Code2WavOptions) -> tuple[int, bool] | None:
        """Return the frames of the next chunk and whether it is the last; None: there is none to decode now."""
        if self.paused:
            return None
        due = options.chunk_frames[min(self.chunks, len(options.chunk_frames) - 1)]
        if options.decode == "exact" and self.frames >= due:
            return due, False
        return None if self.open else (self.frames, True)

    def take(self, frames: int) -> torch.Tensor:
        """Take the next frames, int64 (groups, frames)."""
        codes = torch.cat(self.pending, -1)
        self.pending = [codes[:, frames:]]
        self.frames -= frames
        self.chunks += 1
        return codes[:, :frames]


class Code2WavEngine(PausableEngine[_Request]):
    """See the module. ``context.model``: a checkpoint directory of Qwen3-Omni; it loads the ``code2wav`` weights."""

    def __init__(self, context: StageContext) -> None:
        """Raises msgspec.ValidationError (options), WrongCheckpoint, OSError (the checkpoint's files)."""
        super().__init__()
        self._options = msgspec.convert(context.options, Code2WavOptions)
        torch.set_num_threads(context.threads)
        context.report("reading the weights of code2wav")
        dtype = getattr(torch, self._options.dtype)
        model = load_part(Qwen3OmniMoeCode2Wav, context.model_directory, "code2wav", dtype, context.device)
        self._device = torch.device(context.device)
        self._decoder = StreamingDecoder(model)

    @property
    def busy(self) -> bool:
        return any(request.next_chunk(self._options) for request in self._requests.values())

    def _new_request(self, request: StageRequest) -> _Request:
        return _Request(request)

    def _take(self, request: _Request, chunk: Chunk) -> None:
        if chunk.tensors:
            codes = self._checked(chunk)
            request.pending.append(codes)
            request.frames += codes.shape[-1]
        request.open.update(chunk)

    def _checked(self, chunk: Chunk) -> torch.Tensor:
        """Return a copy of the chunk's codes, int64 (groups, frames). Raises ``InvalidRequest``."""
        codes = chunk.tensors.get("codes")
        groups, size = self._decoder.groups, self._decoder.codebook
        if codes is None or not codes.dtype.startswith(("int", "uint")):
            raise _refusal(f"codes, integers, were expected, not {sorted(chunk.tensors)}")
        if len(codes.shape) != 2 or codes.shape[0] < 1 or codes.shape[1] != groups:
            raise _refusal(f"codes of shape (frames, {groups}) were expected, not {codes.shape}")
        copied = codes.numpy().astype(np.int64)
        if copied.min() < 0 or copied.max() >= size:
            raise _refusal(f"codes from 0 to {size - 1} were expected, not {copied.min()} to {copied.max()}")
        return torch.from_numpy(copied.T.copy())

    def step(self) -> Iterator[StageOutput]:
        groups: dict[tuple[int, bool, bool], list[RequestId]] = {}
        for request_id, request in self._requests.items():
            if chunk := request.next_chunk(self._options):
                groups.setdefault((*chunk, request.chunks == 0), []).append(request_id)
        for (frames, last, _), members in groups.items():
            for at in range(0, len(members), self._options.max_batch):
                yield from self._decode(members[at : at + self._options.max_batch], frames, last=last)

    def _decode(self, members: list[RequestId], frames: int, *, last: bool) -> Iterator[StageOutput]:
        requests = [self._requests[member] for member in members]
        waves: list[np.ndarray[Any, np.dtype[np.float32]]] = [np.zeros(0, np.float32)] * len(members)
        if frames:
            codes = torch.stack([request.take(frames) for request in requests]).to(self._device)
            if self._options.decode == "reference":
                decoded = self._decoder.decode_reference(codes)
            else:
                decoded = self._decoder.decode(codes, [request.state for request in requests])
            waves = [row.copy() for row in decoded.float().cpu().numpy()]  # a view would keep the other rows alive
        for member, wave in zip(members, waves, strict=True):
            if last:
                del self._requests[member]
            yield StageOutput(member, {"audio": wave} if len(wave) else {}, {"sample_rate": SAMPLE_RATE}, last)


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="codes")
