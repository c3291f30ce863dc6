"""The layers of Qwen3-Omni's talker as a vLLM model class whose embedding table is written while the model runs.

A token id is only an index into two tables. Before the engine sends a prompt, it writes each position's input and
rotation (rotary cosines and sines) into the rows of its ids, and keeps them while vLLM might compute the position
again. So a model whose inputs are not tokens runs on vLLM, with a new input at every step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import apply_rotary_pos_emb
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.layers.pooler import DispatchPooler
from vllm.model_executor.models import VllmModelForPooling
from vllm.model_executor.models.qwen3_moe import Qwen3MoeModel

from omni_actors.stages.vllm._internals import UnsupportedVLLMVersion

ARCHITECTURE = "OmniActorsQwen3TalkerLayers"
PREFIX = "talker.model."


class TalkerLayers(nn.Module, VllmModelForPooling):  # type: ignore[misc]
    """A pooling model: it answers a prompt with the hidden state of its last position, after the final norm."""

    is_pooling_model = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.model = Qwen3MoeModel(vllm_config=vllm_config, prefix="model")
        if not all(hasattr(layer.self_attn, "rotary_emb") for layer in self.model.layers):
            raise UnsupportedVLLMVersion(["Qwen3MoeAttention.rotary_emb"])
        for layer in self.model.layers:
            layer.self_attn.rotary_emb = _Rotation(config.head_dim)
        self.rotations: Tensor
        self.register_buffer("rotations", torch.zeros(config.vocab_size, 2, config.head_dim), persistent=False)
        self.pooler = DispatchPooler.for_embedding(vllm_config.model_config.pooler_config)

    def write(self, ids: Tensor, inputs: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Write the rows of ``ids``, int64 (…): inputs (…, hidden), cos and sin (…, head size)."""
        self.model.embed_tokens.weight[ids] = inputs
        self.rotations[ids] = torch.stack([cos, sin], -2)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self.model.embed_input_ids(input_ids)
        return embedded

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        hidden: Tensor = self.model(input_ids, self.rotations[input_ids], intermediate_tensors, inputs_embeds)
        return hidden

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        layers = ((name.removeprefix(PREFIX), weight) for name, weight in weights if name.startswith(PREFIX))
        loaded = self.model.load_weights((name, weight) for name, weight in layers if "codec_embedding" not in name)
        return {f"model.{name}" for name in (*loaded, "embed_tokens.weight")}


class _Rotation(nn.Module):
    """Takes the place of vLLM's rotary embedding. In place of positions it gets cosines and sines, (n, 2, head size).

    vLLM's own positions are whole numbers, which a video's positions need not be.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def forward(self, rotations: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        heads = [states.view(len(states), -1, self._size) for states in (query, key)]
        query, key = apply_rotary_pos_emb(*heads, *rotations.unbind(1))
        return query.flatten(1), key.flatten(1)


def register(ids: int) -> Callable[[Any], Any]:
    """Register the model class with vLLM, with tables of ``ids`` rows; return the function for ``hf_overrides``."""
    ModelRegistry.register_model(ARCHITECTURE, TalkerLayers)

    def layers_only(whole: Any) -> Any:
        if not hasattr(whole, "talker_config"):  # vLLM first calls it with an empty configuration, to learn the type
            return whole
        config = copy.deepcopy(whole.talker_config.text_config)
        config.architectures, config.vocab_size, config.tie_word_embeddings = [ARCHITECTURE], ids, False
        # With these entries vLLM would compute positions on three axes.
        rope = config.rope_parameters
        config.rope_parameters = {name: rope[name] for name in rope if not name.startswith("mrope")}
        return config

    return layers_only
