"""What passes from Qwen3-Omni's thinker to its talker.

The talker reads the user's words and the answer as the thinker saw them: a position of text as its embedding, one of
sound or picture as the hidden state of layer ``accept_hidden_layer``. Of the prompt it gets the user's turns and the
three positions that open the answer, then each token of the answer but the last.

Wire: the first chunk of a request has tensors ``ids``, int64 (n,): the tokens of all prompt rows to come; ``heard``,
bool (n,): which of them are sound or picture; ``tts``, (3, hidden): the embeddings of the thinker's tts_bos, tts_eos
and tts_pad; and, with such input, the grids and lengths that positions are computed from. Any chunk may bring
``rows``, (k, hidden) in the thinker's dtype: the next prompt rows, and behind them the answer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

HEADER = 3
"""Positions that open the answer: its start, the role, a newline."""
GRIDS = ("image_grid_thw", "video_grid_thw", "video_second_per_grid", "audio_lengths")


def spoken_positions(ids: Tensor, config: Any) -> Tensor:
    """Which positions of a prompt the talker gets: bool, of the shape of ``ids``, int64 (n,).

    The user's turns, and the first ``HEADER`` of the turn that is to be written. config: of the whole model.
    """
    at = torch.arange(len(ids))
    starts = torch.where(ids == config.im_start_token_id, at, -1)
    role = ids[(starts.cummax(0).values.clamp_min(0) + 1).clamp_max(len(ids) - 1)]
    chosen: Tensor = role == config.user_token_id
    answers = (ids[:-1] == config.im_start_token_id) & (ids[1:] == config.assistant_token_id)
    if found := answers.nonzero().flatten().tolist():
        chosen[found[-1] : found[-1] + HEADER] = True
    return chosen


def is_heard(ids: Tensor, config: Any) -> Tensor:
    """Which of ``ids`` stand for sound or picture: bool, of the same shape. config: of the whole model."""
    thinker = config.thinker_config
    tokens = [thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id]
    return torch.isin(ids, torch.tensor(tokens, device=ids.device))


def grids_of(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a processor's tensors those that positions are computed from, under the names of ``GRIDS``."""
    grids = {name: inputs[name] for name in GRIDS if name in inputs}
    if (mask := inputs.get("feature_attention_mask")) is not None:
        grids["audio_lengths"] = mask.sum(1)
    return grids


def positions_of(
    model: Any, ids: Tensor, grids: Mapping[str, Tensor], *, use_audio_in_video: bool
) -> tuple[Tensor, float]:
    """Three-axis rotary positions, (3, n), and what to add to a later place for its position on all axes.

    Those of a video are its seconds times a constant, so at some rates they are fractions, as in the reference.
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
