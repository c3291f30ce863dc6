"""Qwen3-Omni's code predictor (MTP): the other codes of a frame, from the talker's state and the frame's first code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from omni_actors.stages.autoregressive.sampling import Sampler, choose


class CodePredictor:
    """module: the talker's ``code_predictor``. A call is one frame of each of some requests, in the same forwards."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._embeddings = module.model.get_input_embeddings()

    @torch.inference_mode()
    def __call__(
        self, state: Tensor, first: Tensor, samplers: Sequence[Sampler | None]
    ) -> tuple[list[list[int] | None], Tensor]:
        """The other codes of each frame, and the sum of the embeddings of all its codes, (batch, hidden).

        None in place of a frame's codes: for one of them ``choose`` gave None.
        state, first: (batch, hidden) each, the talker's last hidden state and the embedding of the frame's first code.
        """
        cache = DynamicCache(config=self._module.config)
        inputs = torch.stack([state, first], 1)
        embedded = [first]
        codes: list[list[int | None]] = []
        for head, embedding in zip(self._module.lm_head, self._embeddings, strict=True):
            hidden = self._module.model(inputs_embeds=inputs, past_key_values=cache, use_cache=True).last_hidden_state
            chosen = choose(head(hidden[:, -1]), samplers)
            codes.append(chosen)
            # A frame that has failed goes on with any code, so that the others keep their rows.
            embedded.append(embedding(torch.tensor([code or 0 for code in chosen], device=first.device)))
            inputs = embedded[-1][:, None]
        frames = [[code for code in frame if code is not None] for frame in zip(*codes, strict=True)]
        whole = [frame if len(frame) == len(codes) else None for frame in frames]
        return whole, torch.stack(embedded, 1).sum(1)
