"""Log probabilities of chosen tokens, in the format of the engines on vLLM.

They are those of the model: of the logits before bias, penalties, temperature and excluded tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omni_actors.stages.autoregressive.text import Vocabulary

_LEAST = -9999.0
"""In place of -inf, which JSON does not have."""


def token_logprobs(logits: Tensor, token: int, count: int, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Return ``token`` and then the ``count`` most likely tokens, without ``token`` if it is one of them.

    logits: (vocabulary,), from which the token was chosen. Each entry is ``{"token_id", "logprob", "rank", "token"}``;
    rank 1 is the most likely token.
    """
    row = logits.float().log_softmax(-1)
    ranks = {token: int((row > row[token]).sum()) + 1}
    for rank, other in enumerate(row.topk(min(count, len(row))).indices.tolist(), start=1):
        ranks.setdefault(other, rank)
    values = row[torch.tensor([*ranks], device=row.device)].tolist()  # one copy for all of them
    return [
        {
            "token_id": each,
            "logprob": max(value, _LEAST),
            "rank": rank,
            "token": vocabulary.decode([each], skip_special_tokens=False),
        }
        for (each, rank), value in zip(ranks.items(), values, strict=True)
    ]
