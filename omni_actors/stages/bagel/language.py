"""BAGEL's language model: a mixture of two transformers over one sequence.

Each layer has two experts with all their weights: one for text and what the vision tower sees ("understanding"), one
for latents of pictures ("generation"). Tokens of both attend to each other. Parameter names are the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from omni_actors.stages.bagel.config import LanguageConfig

Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of layer ``n``: from the new tokens' queries (rows, count, heads, head size), and their keys and values, to
(rows, count, heads * head size). It decides what a token sees, and keeps the keys and values."""


class Experts(NamedTuple):
    """The tokens of each expert: int64 indices along the second dimension."""

    understanding: Tensor
    generation: Tensor


def _by_expert(states: Tensor, experts: Experts | None, understand: nn.Module, generate: nn.Module) -> Tensor:
    """Apply to each token, (rows, count, n), the module of its expert. None: all tokens are understanding."""
    understood: Tensor
    if experts is None:
        understood = understand(states)
        return understood
    understood = understand(states[:, experts.understanding])
    result = understood.new_empty(*states.shape[:2], *understood.shape[2:])
    result[:, experts.understanding] = understood
    result[:, experts.generation] = generate(states[:, experts.generation])
    return result


class RMSNorm(nn.Module):
    """Root mean square normalisation, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self._eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, states: Tensor) -> Tensor:
        wide = states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return self.weight * wide.to(states.dtype)


class _MLP(nn.Module):
    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        result: Tensor = self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))
        return result


class _Attention(nn.Module):
    def __init__(self, config: LanguageConfig, layer: int) -> None:
        super().__init__()
        self._layer, self._head_size = layer, config.head_size
        hidden, shared = config.hidden_size, config.num_key_value_heads * config.head_size
        for suffix in ("", "_moe_gen"):
            for name, size in (("q", hidden), ("k", shared), ("v", shared)):
                self.add_module(f"{name}_proj{suffix}", nn.Linear(hidden, size))
            self.add_module(f"o_proj{suffix}", nn.Linear(hidden, hidden, bias=False))
            for name in ("q", "k"):
                self.add_module(f"{name}_norm{suffix}", RMSNorm(config.head_size, config.rms_norm_eps))

    def forward(self, states: Tensor, rotary: tuple[Tensor, Tensor], experts: Experts | None, attend: Attend) -> Tensor:
        queries, keys, values = (self._by_heads(self._expert(f"{name}_proj", states, experts)) for name in "qkv")
        queries = _rotated(self._expert("q_norm", queries, experts), rotary)
        keys = _rotated(self._expert("k_norm", keys, experts), rotary)
        return self._expert("o_proj", attend(self._layer, queries, keys, values), experts)

    def _by_heads(self, states: Tensor) -> Tensor:
        return states.reshape(*states.shape[:2], -1, self._head_size)

    def _expert(self, name: str, states: Tensor, experts: Experts | None) -> Tensor:
        return _by_expert(states, experts, self.get_submodule(name), self.get_submodule(f"{name}_moe_gen"))


class _Layer(nn.Module):
    def __init__(self, config: LanguageConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = _Attention(config, layer)
        self.mlp, self.mlp_moe_gen = _MLP(config), _MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm_moe_gen = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm_moe_gen = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, states: Tensor, rotary: tuple[Tensor, Tensor], experts: Experts | None, attend: Attend) -> Tensor:
        normed = _by_expert(states, experts, self.input_layernorm, self.input_layernorm_moe_gen)
        states = states + self.self_attn(normed, rotary, experts, attend)
        normed = _by_expert(states, experts, self.post_attention_layernorm, self.post_attention_layernorm_moe_gen)
        return states + _by_expert(normed, experts, self.mlp, self.mlp_moe_gen)


class Decoder(nn.Module):
    """The layers between the embeddings and the output layers."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self._config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config, number) for number in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_moe_gen = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, states: Tensor, positions: Tensor, experts: Experts | None, attend: Attend) -> Tensor:
        """Return the hidden states of new tokens, normed, (rows, count, hidden).

        states: their embeddings, (rows, count, hidden). positions: int64 (rows, count). experts: None means that all
        tokens are understanding. attend: what they see.
        """
        rotary = self._rotary(positions, states.dtype)
        for layer in self.layers:
            states = layer(states, rotary, experts, attend)
        return _by_expert(states, experts, self.norm, self.norm_moe_gen)

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        size = self._config.head_size
        steps = torch.arange(0, size, 2, dtype=torch.int64, device=positions.device).float() / size
        angles = positions[..., None].float() * (1.0 / self._config.rope_theta**steps)
        angles = torch.cat([angles, angles], dim=-1)[:, :, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


class LanguageModel(nn.Module):
    """The decoder and the output layer of text; without the latter, only pictures come out."""

    def __init__(self, config: LanguageConfig, *, writes: bool) -> None:
        super().__init__()
        self.model = Decoder(config)
        if writes:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


def _rotated(states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotary
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin
