"""Recordings for Qwen3-Omni on vLLM: a request's rows do not depend on what vLLM encodes beside it.

The encoder cuts recordings into chunks and pads all chunks of one call to the longest. Nothing masks the padding
between its convolutions, so a chunk's last rows depend on how far it was padded. transformers encodes all recordings of
a request in one call, vLLM 0.32.0 those that a step needs, of any requests. The rows differ for recordings shorter than
a chunk (1 s), if no chunk of the call is whole.

So each recording names the length to which transformers pads it, and a chunk of zeros of that length joins the call.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from torch import Tensor

from omni_actors.stages.vllm._internals import HiddenStateWorker, UnsupportedVLLMVersion

PADDED_FRAMES = "padded_frames"
"""The name of the feature of each recording."""
STRIDE = 8
"""Frames of a row: three convolutions halve their number, rounded up."""


def padded_frames(lengths: Tensor, audio: Any) -> Tensor:
    """Return the longest chunk of a request's recordings, in frames, for each recording, (n,).

    lengths: frames of each, (n,). audio: the encoder's configuration.
    """
    return lengths.clamp(max=2 * audio.n_window).max().expand(len(lengths)).clone()


class Qwen3ThinkerWorker(HiddenStateWorker):
    """Pads each recording as ``PADDED_FRAMES`` says."""

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        model = self.model_runner.get_model()
        try:
            _pad_by_request(model, model.audio_tower)
        except AttributeError as exc:
            raise UnsupportedVLLMVersion([f"{type(exc.obj).__name__}.{exc.name}"]) from exc


def _pad_by_request(model: Any, encoder: Any) -> None:
    embed, encode = model.embed_multimodal, encoder.forward
    padded: list[int] = []
    """The feature ``PADDED_FRAMES`` of the present call. It is empty when vLLM tries how much memory it needs."""

    def embed_multimodal(**features: Any) -> Any:
        named = features.pop(PADDED_FRAMES, None)
        padded[:] = [] if named is None else named.flatten().tolist()
        return embed(**features)

    def forward(frames: Any, feature_lens: Tensor, aftercnn_lens: Tensor) -> Any:
        if not padded:
            return encode(frames, feature_lens, aftercnn_lens)
        recordings, counts = frames.split(feature_lens.tolist(), dim=1), aftercnn_lens.tolist()
        rows: list[Tensor] = [frames.new_empty(0)] * len(recordings)
        for length in set(padded):
            these = [at for at, each in enumerate(padded) if each == length]
            zeros = frames.new_zeros(len(frames), length)
            encoded = encode(
                torch.cat([*(recordings[at] for at in these), zeros], 1),
                torch.cat([feature_lens[these], feature_lens.new_tensor([length])]),
                torch.cat([aftercnn_lens[these], aftercnn_lens.new_tensor([ceil(length / STRIDE)])]),
            )
            found = encoded[: sum(counts[at] for at in these)].split([counts[at] for at in these])
            for at, part in zip(these, found, strict=True):
                rows[at] = part
        return torch.cat(rows)

    model.embed_multimodal, encoder.forward = embed_multimodal, forward
