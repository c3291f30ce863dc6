"""What Qwen3-Omni's thinker hands to its talker.

The talker takes the user's turns and the answer as the thinker's hidden states: of a text position its embedding, of a
media position the hidden state of layer ``accept_hidden_layer``. From the prompt it takes the user's turns and the
three positions that open the answer, then every token of the answer but the last.

Wire, besides what every talker takes (``omni.talker``). The first chunk of a request has:
- ``is_media``, bool (n,): which of the prompt rows to come are audio, images or video
- ``tts``, (3, hidden): the thinker's embeddings of tts_bos, tts_eos and tts_pad
- with media: the tensors that positions are computed from (``omni.positions.GRIDS``)

The rules are those of ``Qwen3OmniMoeForConditionalGeneration.generate`` of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from omni_actors.stages.omni.prompt_engine import OmniRequest

ANSWER_HEADER = 3
"""The positions that open the answer: the start token, the role and a newline."""


def talker_positions(ids: Tensor, config: Any) -> Tensor:
    """Return which positions of a prompt the talker takes: bool, of the shape of ``ids``, int64 (n,).

    These are the user's turns and the first ``ANSWER_HEADER`` positions of the answer's turn. config: of the whole
    model.
    """
    at = torch.arange(len(ids))
    starts = torch.where(ids == config.im_start_token_id, at, -1)
    role = ids[(starts.cummax(0).values.clamp_min(0) + 1).clamp_max(len(ids) - 1)]
    chosen: Tensor = role == config.user_token_id
    answers = (ids[:-1] == config.im_start_token_id) & (ids[1:] == config.assistant_token_id)
    if found := answers.nonzero().flatten().tolist():
        chosen[found[-1] : found[-1] + ANSWER_HEADER] = True
    return chosen


def handoff_header(request: OmniRequest, config: Any, embed: Callable[[list[int]], Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a request's first chunk, without rows. embed: the thinker's embedding table."""
    assert request.handoff is not None
    chosen = request.handoff.selected
    tts = embed([config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id])
    return {"ids": request.ids[chosen], "is_media": request.is_media[chosen], "tts": tts, **request.grids}
