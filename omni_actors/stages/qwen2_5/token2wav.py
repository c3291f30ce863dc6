"""Qwen2.5-Omni's token2wav on transformers: codec codes to a waveform.

Input: tensors ``codes``, an integer array (n, 1), n at least 1, 50 codes a second. A chunk without tensors only ends
the input.

Output: tensors ``audio``, float32 (n,), in chunks of ``chunk_blocks`` blocks; data ``sample_rate`` (24000 Hz). The end
of the input causes the request's last outputs. A request without codes has one output, without audio. The cuts between
outputs depend on the number of codes alone, not on when they arrived. Each request is computed by itself.

The model is not causal, and its sound starts as noise, which is drawn from ``seed``.
- ``decode`` "reference": all codes are decoded together, once all have arrived, in one step. It is transformers' own
  forward after ``torch.manual_seed``, bit for bit.
- ``decode`` "exact": the samples are the same to 1e-4, and come while codes arrive. The model's look-ahead is bounded:
  a block is final once the codes of the next 38 blocks have arrived, which are 9.1 s of speech (36 blocks for the flow,
  2 for the vocoder; fewer with fewer ``steps``). An earlier output would be another sound: other servers decode
  overlapping windows by themselves, and a window sees other blocks, and other noise, than the whole. The noise comes
  from torch's CPU generator on any device, where the reference uses the device's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from omni_actors.stages.base import Chunk, InvalidRequest, RequestId, StageContext, StageOutput, StageRequest
from omni_actors.stages.checkpoint import load_part
from omni_actors.stages.engine import PausableEngine
from omni_actors.stages.qwen2_5.flow import GUIDANCE, SWAY, Flow, FlowStream
from omni_actors.stages.qwen2_5.options import Token2WavOptions, Token2WavParams
from omni_actors.stages.qwen2_5.speakers import Speaker, load_speakers, speaker_named
from omni_actors.stages.qwen2_5.vocoder import Vocoder, VocoderStream
from omni_actors.stages.refusal import validated
from omni_actors.stages.sources import OpenSources

SAMPLE_RATE = 24_000


class _Request:
    """One request."""

    def __init__(self, request: StageRequest, speaker: Speaker, seed: int) -> None:
        self.open = OpenSources(request.sources)
        self.speaker, self.seed = speaker, seed
        self.waiting = torch.empty(0, dtype=torch.int64)
        """Codes that wait to be decoded, int64 (n,)."""
        self.codes = 0
        """Codes that have arrived."""
        self.streams: tuple[FlowStream, VocoderStream] | None = None
        """Opened with the first chunk."""
        self.paused = False

    def take(self, codes: int) -> Tensor:
        """Take the next codes, int64 (codes,)."""
        taken, self.waiting = self.waiting[:codes], self.waiting[codes:]
        return taken


class Token2WavEngine(PausableEngine[_Request]):
    """See the module. ``context.model``: a checkpoint directory of Qwen2.5-Omni; it loads the ``token2wav`` weights."""

    def __init__(self, context: StageContext) -> None:
        """Raises msgspec.ValidationError (options), WrongCheckpoint, OSError (the checkpoint's files)."""
        super().__init__()
        self._options = msgspec.convert(context.options, Token2WavOptions)
        directory = context.model_directory
        torch.set_num_threads(context.threads)
        context.report("reading the weights of token2wav")
        # The model's authors run it in float32, whatever the checkpoint's dtype is.
        self._model: Any = load_part(Qwen2_5OmniToken2WavModel, directory, "token2wav", torch.float32, context.device)
        self._speakers = load_speakers(directory)
        self._flow = Flow(self._model.code2wav_dit_model, self._options.steps)
        self._vocoder = Vocoder(self._model.code2wav_bigvgan_model)
        self._chunk_codes = self._options.chunk_blocks * self._flow.block_codes
        self._chunk_frames = self._options.chunk_blocks * self._flow.block

    @property
    def busy(self) -> bool:
        return any(self._next_chunk(request) for request in self._requests.values())

    def _new_request(self, request: StageRequest) -> _Request:
        params = validated(request.params, Token2WavParams)
        speaker = speaker_named(params.speaker, self._speakers)
        seed = torch.seed() if params.seed is None else params.seed
        return _Request(request, speaker, seed & (2**64 - 1))

    def _take(self, request: _Request, chunk: Chunk) -> None:
        if chunk.tensors:
            codes = self._checked(chunk, request.codes)
            request.waiting = torch.cat([request.waiting, codes])
            request.codes += len(codes)
        request.open.update(chunk)

    def _checked(self, chunk: Chunk, before: int) -> Tensor:
        """Return a copy of the codes, int64 (n,). before: codes that arrived earlier. Raises ``InvalidRequest``."""
        codes, size = chunk.tensors.get("codes"), self._flow.codes
        if codes is None or not codes.dtype.startswith(("int", "uint")):
            raise _refusal(f"codes, integers, were expected, not {sorted(chunk.tensors)}")
        if len(codes.shape) != 2 or codes.shape[0] < 1 or codes.shape[1] != 1:
            raise _refusal(f"codes of shape (n, 1) were expected, not {codes.shape}")
        copied = codes.numpy()[:, 0].astype(np.int64)
        if copied.min() < 0 or copied.max() >= size:
            raise _refusal(f"codes from 0 to {size - 1} were expected, not {copied.min()} to {copied.max()}")
        if before + len(copied) > self._flow.longest:
            raise _refusal(f"{self._flow.longest} codes at most were expected, not {before + len(copied)}")
        return torch.from_numpy(copied)

    def step(self) -> Iterator[StageOutput]:
        for request_id, request in list(self._requests.items()):
            if chunk := self._next_chunk(request):
                codes, last = chunk
                yield from self._outputs(request_id, self._decode(request, request.take(codes), last=last), last=last)

    def _next_chunk(self, request: _Request) -> tuple[int, bool] | None:
        """Return the codes of the next chunk and whether it is the last; None: there is none to decode now."""
        if request.paused:
            return None
        if self._options.decode == "exact" and len(request.waiting) >= self._chunk_codes:
            return self._chunk_codes, False
        return None if request.open else (len(request.waiting), True)

    def _decode(self, request: _Request, codes: Tensor, *, last: bool) -> Iterator[Tensor]:
        """Yield the next waves, (samples,) each."""
        if not request.codes:
            return
        if self._options.decode == "reference":
            yield from torch.split(self._decode_reference(request, codes), self._chunk_frames * self._vocoder.samples)
            return
        if request.streams is None:
            request.streams = FlowStream(self._flow, request.speaker, request.seed), VocoderStream(self._vocoder)
        flow, vocoder = request.streams
        vocoder.push(flow.push(codes, last=last))
        while (wave := vocoder.pop(self._chunk_frames, last=last)) is not None:
            yield wave

    @torch.inference_mode()
    def _decode_reference(self, request: _Request, codes: Tensor) -> Tensor:
        torch.manual_seed(request.seed)
        wave: Tensor = self._model(
            codes[None].to(self._flow.device),
            conditioning=request.speaker.cond.to(self._flow.device),
            reference_mel=request.speaker.ref_mel.to(self._flow.device),
            num_steps=self._options.steps,
            guidance_scale=GUIDANCE,
            sway_coefficient=SWAY,
        )
        return wave.reshape(-1)

    def _outputs(self, request_id: RequestId, waves: Iterator[Tensor], *, last: bool) -> Iterator[StageOutput]:
        data = {"sample_rate": SAMPLE_RATE}
        wave = next(waves, None)
        while wave is not None:
            following = next(waves, None)
            ends = last and following is None
            if ends:
                del self._requests[request_id]
            yield StageOutput(request_id, {"audio": wave.cpu().numpy().copy()}, data, ends)
            wave = following
        if last and request_id in self._requests:
            del self._requests[request_id]
            yield StageOutput(request_id, {}, data, last=True)

    def close(self) -> None:
        self._requests.clear()


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="codes")
