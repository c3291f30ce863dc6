"""What passes from Qwen3-Omni's thinker to its talker.

The talker reads the user's words and the answer as the thinker saw them: a position of text as its embedding, one of
sound or picture as the hidden state of layer ``accept_hidden_layer``. Of the prompt it gets the user's turns and the
three positions that open the answer, then each token of the answer but the last.

Wire, besides what every talker gets (``omni.talker``): the first chunk of a request has ``is_media``, bool (n,): which
of the prompt rows to come are sound or picture; ``tts``, (3, hidden): the embeddings of the thinker's tts_bos, tts_eos
and tts_pad; and, with such input, the grids and lengths that positions are computed from (``omni.positions``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ANSWER_HEADER = 3
"""Positions that open the answer: its start, the role, a newline."""


def talker_positions(ids: Tensor, config: Any) -> Tensor:
    """Which positions of a prompt the talker gets: bool, of the shape of ``ids``, int64 (n,).

    The user's turns, and the first ``ANSWER_HEADER`` of the turn that is to be written. config: of the whole model.
    """
    at = torch.arange(len(ids))
    starts = torch.where(ids == config.im_start_token_id, at, -1)
    role = ids[(starts.cummax(0).values.clamp_min(0) + 1).clamp_max(len(ids) - 1)]
    chosen: Tensor = role == config.user_token_id
    answers = (ids[:-1] == config.im_start_token_id) & (ids[1:] == config.assistant_token_id)
    if found := answers.nonzero().flatten().tolist():
        chosen[found[-1] : found[-1] + ANSWER_HEADER] = True
    return chosen
