"""Rotary positions of a multimodal prompt, on three axes (multimodal RoPE: time, height, width)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

GRIDS = ("image_grid_thw", "video_grid_thw", "video_second_per_grid", "audio_lengths")
"""The tensors that positions are computed from, besides the token ids."""


def is_media(ids: Tensor, config: Any) -> Tensor:
    """Return which of ``ids`` stand for audio, images or video: bool, of the same shape. config: of the whole model."""
    thinker = config.thinker_config
    tokens = [thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id]
    return torch.isin(ids, torch.tensor(tokens, device=ids.device))


def position_grids(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select the tensors named in ``GRIDS`` from a processor's output."""
    grids = {name: inputs[name] for name in GRIDS if name in inputs}
    if (mask := inputs.get("feature_attention_mask")) is not None:
        grids["audio_lengths"] = mask.sum(1)
    return grids


def rotary_positions(
    model: Any, ids: Tensor, grids: Mapping[str, Tensor], *, use_audio_in_video: bool
) -> tuple[Tensor, float]:
    """Compute a prompt's rotary positions with transformers' own ``get_rope_index``.

    model: a thinker or talker of transformers, which may be without weights. ids: int64 (n,). grids: by the names of
    ``GRIDS``. Returns the positions, (3, n), and the delta of later positions: position i >= n is i + delta on all
    axes. A video's positions are its seconds times a constant, so at some frame rates they are fractions.
    """
    if not any(name in grids for name in ("image_grid_thw", "video_grid_thw")):
        return torch.arange(len(ids)).expand(3, -1), 0.0
    positions, delta = model.get_rope_index(
        ids[None],
        image_grid_thw=grids.get("image_grid_thw"),
        video_grid_thw=grids.get("video_grid_thw"),
        attention_mask=torch.ones_like(ids)[None],
        use_audio_in_video=use_audio_in_video,
        audio_seqlens=grids.get("audio_lengths"),
        second_per_grids=grids.get("video_second_per_grid"),
    )
    return positions[:, 0], float(delta.item())
