"""Rows of different lengths in one forward of diffusers' transformer.

The transformer has one set of positions for all rows, and a mask for prompts alone. So ``PaddedAttention`` takes the
positions and the mask of each row from ``Padded``, which the transformer passes on in ``attention_kwargs``. Without
``Padded`` it is diffusers' own attention, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from torch import Tensor
from torch.nn import functional


class Padded(msgspec.Struct, frozen=True):
    """The rows of a forward. A row's tokens are those of its prompt, then those of its pictures.

    image, text: rotations of the positions, complex (rows, n, half of a head). mask: what tokens see, bool
    (rows, 1, 1, tokens).
    """

    image: Tensor
    text: Tensor
    mask: Tensor


class PaddedAttention:
    """diffusers' attention of a block, and the same with ``padded`` rows."""

    def __init__(self) -> None:
        untyped: Any = QwenDoubleStreamAttnProcessor2_0
        self._diffusers = untyped()

    def __call__(  # diffusers finds the arguments by their names
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
        padded: Padded | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the attention of the pictures' tokens and that of the prompts' tokens, each (rows, n, width)."""
        if padded is None:
            own: tuple[Tensor, Tensor] = self._diffusers(
                attn,
                hidden_states,
                encoder_hidden_states,
                encoder_hidden_states_mask,
                attention_mask,
                image_rotary_emb,
            )
            return own
        heads = (-1, attn.inner_dim // attn.heads)

        def project(states: Tensor, layers: Sequence[Any], norms: Sequence[Any], rotations: Tensor) -> list[Tensor]:
            """Return queries, keys and values, (rows, n, heads, size of a head)."""
            queries, keys, values = (layer(states).unflatten(-1, heads) for layer in layers)
            return [
                *(_rotated(norm(each), rotations) for norm, each in zip(norms, (queries, keys), strict=True)),
                values,
            ]

        of_text = project(
            encoder_hidden_states,
            (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
            (attn.norm_added_q, attn.norm_added_k),
            padded.text,
        )
        of_image = project(hidden_states, (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k), padded.image)
        queries, keys, values = (torch.cat(pair, dim=1).transpose(1, 2) for pair in zip(of_text, of_image, strict=True))
        seen = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=padded.mask)
        seen = seen.transpose(1, 2).flatten(2)
        prompts = encoder_hidden_states.shape[1]
        image = attn.to_out[0](seen[:, prompts:].contiguous())  # what follows in to_out is dropout
        return image, attn.to_add_out(seen[:, :prompts].contiguous())


def pad(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return rows (n, …) of different lengths as one tensor (rows, n, …), and which are not padding: bool (rows, n)."""
    lengths = torch.tensor([len(row) for row in rows])
    padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    return padded, (torch.arange(padded.shape[1]) < lengths[:, None]).to(padded.device)


def _rotated(states: Tensor, rotations: Tensor) -> Tensor:
    """Apply rotary positions to states (rows, n, heads, size), as diffusers does."""
    pairs = torch.view_as_complex(states.float().reshape(*states.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations[:, :, None]).flatten(3).type_as(states)
