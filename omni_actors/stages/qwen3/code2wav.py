"""Qwen3-Omni's code2wav on transformers: codec frames to a waveform, while the frames arrive.

``omni.codec_decoder`` has the input and the output. The groups of a frame are in the talker's order.
- ``decode`` "exact": the samples are those of the model's forward over all frames (to 1e-4 in float32). They come in
  chunks of ``chunk_frames``, the first ones small, so that speech starts early.
- ``decode`` "reference": the samples are those of transformers' ``chunked_decode`` once all frames have arrived, equal
  to the bit if a forward has one request.

A request that goes on after the death of a worker needs the frames that the decoder's state depends on (``streaming``).

A step decodes one chunk of every request that has one. Chunks of the same length share a forward, up to ``max_batch``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omni_actors.stages.base import StageContext, StageOutput, StageRequest
from omni_actors.stages.checkpoint import PartWeights, load_part
from omni_actors.stages.omni.codec_decoder import WHOLE_INPUT, CodecDecoder, CodecRequest
from omni_actors.stages.qwen3.options import Code2WavOptions
from omni_actors.stages.qwen3.streaming import DecoderState, StreamingDecoder


class _Request(CodecRequest):
    state: DecoderState


class Code2WavEngine(CodecDecoder[_Request]):
    """Decodes frames to 24 kHz audio, with the ``code2wav`` weights of ``context.model``, a Qwen3-Omni checkpoint."""

    def __init__(self, context: StageContext) -> None:
        """Raises msgspec.ValidationError (options), WrongCheckpoint, OSError (the checkpoint's files)."""
        self._options = msgspec.convert(context.options, Code2WavOptions)
        self._model: Any = load_part(Qwen3OmniMoeCode2Wav, context, "code2wav", self._options.dtype)
        self._weights = PartWeights(self._model, context, "code2wav")
        self._stream = StreamingDecoder(self._model) if self._options.decode == "exact" else None
        super().__init__(self._model.config.num_quantizers, self._model.config.codebook_size)
        self._capabilities["update_weights"] = self._update_weights

    def _new_request(self, request: StageRequest) -> _Request:
        chunk_frames = self._options.chunk_frames if self._stream else WHOLE_INPUT
        opened = _Request(request, chunk_frames, skip=request.needed_from)
        opened.state = DecoderState()
        return opened

    def step(self) -> Iterator[StageOutput]:
        yield from self._skip()
        groups: dict[tuple[int, bool, bool], list[_Request]] = defaultdict(list)
        for request in self._requests.values():
            if chunk := request.next_chunk:
                groups[*chunk, request.chunks == 0].append(request)
        for (frames, last, _), members in groups.items():
            for at in range(0, len(members), self._options.max_batch):
                batch = members[at : at + self._options.max_batch]
                waves = self._decode(batch, frames) if frames else torch.empty(len(batch), 0)
                for request, wave in zip(batch, waves.float().cpu(), strict=True):
                    yield self._output(request, wave, last=last)

    @torch.inference_mode()
    def _decode(self, requests: list[_Request], frames: int) -> Tensor:
        """Return the samples of the next frames of each request, (requests, samples)."""
        codes = torch.stack([request.take(frames) for request in requests]).to(self._model.device)
        if self._stream:
            for request in requests:
                if request.skipped:
                    self._stream.skip(torch.cat(request.skipped, -1).to(self._model.device), request.state)
                    request.skipped.clear()
            return self._stream.decode(codes, [request.state for request in requests])
        waves: Tensor = self._model.chunked_decode(codes)
        return waves.squeeze(1)

    def _replace_weights(self, files: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        return self._weights.replace(files)
