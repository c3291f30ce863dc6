"""The model's denoiser: a small QwenImageTransformer2DModel, trained by flow matching on the latents of drawings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from shapes import autoencoder
from shapes.captions import Caption
from shapes.drawings import COLOURS, SIDE, coloured
from shapes.text import WIDTH

GRID = SIDE // 16
"""Rows of the packed latents along a side: a row has 2x2 latents of 8x8 pixels."""
_NO_CAPTION = 0.1
"""The share of the training without a caption: what the guidance compares with."""
_ALIKE = 400
"""A batch has captions of about the same length, so many of all: little is computed for padding."""
_AVERAGED = 0.998
"""The weights that are kept are an average over so long: 1 / (1 - this) steps."""


def build(seed: int = 0) -> QwenImageTransformer2DModel:
    torch.manual_seed(seed)
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * autoencoder.CHANNELS,
        out_channels=autoencoder.CHANNELS,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=3,
        joint_attention_dim=WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(shift=1.0)


@torch.no_grad()
def latents(vae: AutoencoderKLQwenImage, masks: NDArray[np.uint8]) -> Tensor:
    """Return the packed latents of all drawings in all colours: float32 (things, colours, each, rows, channels).

    masks: uint8 (things, each, SIDE, SIDE).
    """
    mean, deviation = (torch.tensor(each) for each in (vae.config.latents_mean, vae.config.latents_std))
    things, each = masks.shape[:2]
    made = []
    for colour in COLOURS.values():
        inks = np.tile(np.array(colour, np.uint8), (things * each, 1))
        plain = autoencoder.encode(vae, autoencoder.pixels(coloured(masks.reshape(-1, SIDE, SIDE), inks)))
        normal = (plain[:, :, 0].movedim(1, -1) - mean) / deviation
        squares = normal.reshape(-1, GRID, 2, GRID, 2, autoencoder.CHANNELS).permute(0, 1, 3, 5, 2, 4)
        made.append(squares.reshape(things, each, GRID * GRID, -1))
    return torch.stack(made, dim=1)


def velocity(model: QwenImageTransformer2DModel, noisy: Tensor, level: Tensor, prompts: list[Tensor]) -> Tensor:
    """Return the model's velocity of packed latents. level: (n,), the share of noise. prompts: rows without padding."""
    rows: Any = pad_sequence(prompts, batch_first=True)
    mask = pad_sequence([torch.ones(len(each), dtype=torch.bool) for each in prompts], batch_first=True)
    out: Tensor = model(
        hidden_states=noisy,
        encoder_hidden_states=rows,
        encoder_hidden_states_mask=mask,
        timestep=level,
        img_shapes=[[(1, GRID, GRID)]] * len(noisy),
        return_dict=False,
    )[0]
    return out


class Examples:
    """Random pairs of a picture's packed latents and its caption's hidden states.

    pictures: as ``latents`` returns them. captions: with the hidden states of each. nothing: hidden states of texts
    that say nothing.
    """

    def __init__(
        self, pictures: Tensor, captions: list[tuple[Caption, Tensor]], nothing: list[Tensor], seed: int
    ) -> None:
        self._pictures, self._nothing = pictures, nothing
        self._captions = sorted(captions, key=lambda each: len(each[1]))
        self._random = np.random.default_rng(seed)

    def draw(self, count: int) -> tuple[Tensor, list[Tensor]]:
        """Return packed latents (count, rows, channels), and as many captions, of about the same length."""
        pictures, prompts = [], []
        window = min(_ALIKE, len(self._captions))
        first = self._random.integers(len(self._captions) - window + 1)
        for _ in range(count):
            caption, prompt = self._captions[first + self._random.integers(window)]
            colour = self._random.integers(len(COLOURS)) if caption.colour is None else caption.colour
            pictures.append(self._pictures[caption.thing, colour, self._random.integers(self._pictures.shape[2])])
            if self._random.random() < _NO_CAPTION:
                prompt = self._nothing[self._random.integers(len(self._nothing))]
            prompts.append(prompt)
        return torch.stack(pictures), prompts


def train(
    model: QwenImageTransformer2DModel,
    averaged: QwenImageTransformer2DModel,
    examples: Examples,
    steps: int,
    report: Callable[[int, float], None],
    *,
    batch: int = 48,
    rate: float = 2e-3,
    seed: int = 0,
) -> None:
    """Train for so many steps.

    averaged: gets the model's weights, averaged over the last steps. report: is called with the step and its
    loss, each step.
    """
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.05)
    for step in range(steps):
        pictures, prompts = examples.draw(batch)
        noise, level = torch.randn_like(pictures), torch.sigmoid(torch.randn(batch))
        noisy = torch.lerp(pictures, noise, level[:, None, None])
        loss = (velocity(model, noisy, level, prompts) - (noise - pictures)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        kept = min(_AVERAGED, (step + 1) / (step + 10))
        with torch.no_grad():
            for old, new in zip(averaged.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 1 - kept)
        report(step, loss.item())
