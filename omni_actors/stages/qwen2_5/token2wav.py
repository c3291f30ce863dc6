"""Qwen2.5-Omni's token2wav on transformers: codec codes to a waveform.

``omni.codec_decoder`` has the input and the output. There is one group of codes, 50 codes a second. The outputs have
``chunk_blocks`` blocks each. Each request is computed by itself.

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

import math
import secrets
from collections.abc import Iterator, Mapping
from itertools import chain, pairwise
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from omni_actors.stages.base import StageContext, StageOutput, StageRequest
from omni_actors.stages.checkpoint import PartWeights, load_part
from omni_actors.stages.omni.codec_decoder import WHOLE_INPUT, CodecDecoder, CodecRequest
from omni_actors.stages.qwen2_5.flow import Flow, FlowStream
from omni_actors.stages.qwen2_5.options import Token2WavOptions, Token2WavParams
from omni_actors.stages.qwen2_5.speakers import Speaker, load_speakers, speaker_named
from omni_actors.stages.qwen2_5.vocoder import Vocoder, VocoderStream
from omni_actors.stages.refusal import validated


class _Request(CodecRequest):
    speaker: Speaker
    random: torch.Generator
    """The source of the noise."""
    streams: tuple[FlowStream, VocoderStream] | None = None
    """Opened with the first chunk."""


class Token2WavEngine(CodecDecoder[_Request]):
    """Decodes codes to 24 kHz audio, with the ``token2wav`` weights of ``context.model``, a Qwen2.5-Omni checkpoint."""

    def __init__(self, context: StageContext) -> None:
        """Raises msgspec.ValidationError (options), WrongCheckpoint, OSError (the checkpoint's files)."""
        self._options = msgspec.convert(context.options, Token2WavOptions)
        # The model's authors run it in float32, whatever the checkpoint's dtype is.
        self._model: Any = load_part(Qwen2_5OmniToken2WavModel, context, "token2wav", "float32")
        self._weights = PartWeights(self._model, context, "token2wav")
        self._speakers = load_speakers(context.model_directory)
        self._flow = Flow(self._model.code2wav_dit_model, self._options.steps)
        self._vocoder = Vocoder(self._model.code2wav_bigvgan_model)
        self._chunk_frames = self._options.chunk_blocks * self._flow.block
        super().__init__(1, self._flow.codes, self._flow.longest)
        self._capabilities["update_weights"] = self._update_weights

    def _new_request(self, request: StageRequest) -> _Request:
        params = validated(request.params, Token2WavParams)
        streams = self._options.decode == "exact"
        chunk_sizes = (self._chunk_frames // self._flow.repeats,) if streams else WHOLE_INPUT
        context = math.ceil((self._flow.reach + self._vocoder.reach) / self._chunk_frames)
        opened = _Request(request, chunk_sizes, skip=max(0, request.needed_from - context) if streams else 0)
        opened.speaker, opened.random = speaker_named(params.speaker, self._speakers), _generator(params.seed)
        return opened

    def step(self) -> Iterator[StageOutput]:
        yield from self._skip()
        for request in list(self._requests.values()):
            if chunk := request.next_chunk:
                size, last = chunk
                waves: Iterator[Any] = chain(self._decode(request, size, last=last), [None])
                for wave, following in pairwise(waves):
                    yield self._output(request, wave, last=last and following is None)

    def _decode(self, request: _Request, size: int, *, last: bool) -> Iterator[Tensor]:
        """Yield the waves, (samples,) each, that the next codes complete; of the last chunk, one at least."""
        if not request.received:
            yield torch.empty(0)
            return
        codes = request.take(size)[0]
        if self._options.decode == "reference":
            yield from torch.split(self._decode_reference(request, codes), self._chunk_frames * self._vocoder.samples)
            return
        if request.streams is None:
            skipped = torch.cat([codes.new_empty(0), *(chunk[0] for chunk in request.skipped)])
            flow = FlowStream(self._flow, request.speaker, request.random, skipped)
            silent = (request.needed_from - request.skip) * self._chunk_frames
            request.streams = flow, VocoderStream(self._vocoder, silent)
        flow, vocoder = request.streams
        vocoder.push(flow.push(codes, last=last))
        while (wave := vocoder.pop(self._chunk_frames, last=last)) is not None:
            yield wave

    @torch.inference_mode()
    def _decode_reference(self, request: _Request, codes: Tensor) -> Tensor:
        torch.manual_seed(request.random.initial_seed())
        wave: Tensor = self._model(
            codes[None].to(self._flow.device),
            conditioning=request.speaker.cond.to(self._flow.device),
            reference_mel=request.speaker.ref_mel.to(self._flow.device),
            num_steps=self._options.steps,
        )
        return wave.reshape(-1)

    def _replace_weights(self, files: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        done = self._weights.replace(files)
        self._flow = Flow(self._model.code2wav_dit_model, self._options.steps)  # it has embeddings of the times
        return done


def _generator(seed: int | None) -> torch.Generator:
    """Return the generator of a request's noise. None: a seed from the operating system."""
    number = secrets.randbits(64) if seed is None else seed
    return torch.Generator().manual_seed(number & (2**64 - 1))
