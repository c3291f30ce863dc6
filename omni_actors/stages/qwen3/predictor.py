"""Qwen3-Omni's code predictor: the further codes of a frame, from the talker's hidden state and the first code.

It computes what ``Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration.generate`` of transformers does, for
several requests in each forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from omni_actors.stages.autoregressive.sampling import Sampler, choose


class CodePredictor:
    """Predicts one frame per call for each of several requests. module: the talker's ``code_predictor``."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._embeddings = module.model.get_input_embeddings()

    @torch.inference_mode()
    def __call__(
        self, state: Tensor, first: Tensor, samplers: Sequence[Sampler | None]
    ) -> tuple[list[list[int] | None], Tensor]:
        """Return each frame's further codes, and the sum of the embeddings of all its codes, (batch, hidden).

        state, first: (batch, hidden) each, the talker's last hidden state and the embedding of the frame's first code.
        samplers: of each request; None: greedy. A frame's codes are None if ``choose`` returned None for one of them.
        """
        cache = DynamicCache(config=self._module.config)
        inputs = torch.stack([state, first], 1)
        embedded = [first]
        codes: list[list[int | None]] = []
        for head, embedding in zip(self._module.lm_head, self._embeddings, strict=True):
            hidden = self._module.model(inputs_embeds=inputs, past_key_values=cache, use_cache=True).last_hidden_state
            chosen = choose(head(hidden[:, -1]), samplers)
            codes.append(chosen)
            # A failed frame goes on with code 0, so that the other frames keep their rows.
            embedded.append(embedding(torch.tensor([code or 0 for code in chosen], device=first.device)))
            inputs = embedded[-1][:, None]
        frames = [[code for code in frame if code is not None] for frame in zip(*codes, strict=True)]
        whole = [frame if len(frame) == len(codes) else None for frame in frames]
        return whole, torch.stack(embedded, 1).sum(1)

    @torch.inference_mode()
    def embed(self, first: Tensor, others: Tensor) -> Tensor:
        """Return the sum of the embeddings of each frame's codes, (frames, hidden).

        first: (frames, hidden), the embeddings of the first codes. others: int64 (frames, groups - 1).
        """
        embedded = [embedding(codes) for embedding, codes in zip(self._embeddings, others.T, strict=True)]
        return torch.stack([first, *embedded], 1).sum(1)
