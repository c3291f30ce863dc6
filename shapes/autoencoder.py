"""The model's VAE: an AutoencoderKLQwenImage with few channels, trained on drawings in any colour."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from shapes.drawings import COLOURS, coloured

CHANNELS = 16
"""Channels of the latents; a latent is 8x8 pixels, as Qwen-Image's."""
_NOISE = 0.05
"""Of the latents' deviation: the decoder must not depend on less than this."""


def build() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=CHANNELS,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        temperal_downsample=[False, False, False],
        latents_mean=[0.0] * CHANNELS,
        latents_std=[1.0] * CHANNELS,
    )


class _Planes(nn.Module):
    """Computes a causal convolution of single pictures as a flat one: before them there are zeros only."""

    def __init__(self, convolution: QwenImageCausalConv3d) -> None:
        super().__init__()
        self.convolution = convolution

    def forward(self, pictures: Tensor, *_: Any) -> Tensor:
        weight, bias = self.convolution.weight[:, :, -1], self.convolution.bias
        return F.conv2d(pictures[:, :, 0], weight, bias, padding=weight.shape[-1] // 2)[:, :, None]


def flatten(vae: AutoencoderKLQwenImage) -> list[Callable[[], None]]:
    """Make the VAE's convolutions flat for the training, a third of the work. Returns what makes them as they were.

    The weights of earlier frames become zeros: a picture has none.
    """
    undo = []
    for module in list(vae.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, QwenImageCausalConv3d):
                child.weight.data[:, :, :-1] = 0
                setattr(module, name, _Planes(child))
                undo.append(lambda module=module, name=name, child=child: setattr(module, name, child))
    return undo


def pixels(drawings: NDArray[np.uint8]) -> Tensor:
    """Return drawings as the VAE reads them: float32 (n, 3, 1, SIDE, SIDE) in [-1, 1]."""
    return torch.from_numpy(drawings).permute(0, 3, 1, 2)[:, :, None].float() / 127.5 - 1


def random_inks(count: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Colours for drawings, most of them the model's own: uint8 (count, 3)."""
    own = np.array(list(COLOURS.values()), np.uint8)[random.integers(0, len(COLOURS), count)]
    return np.where(random.random((count, 1)) < 0.9, own, random.integers(0, 240, (count, 3), np.uint8))


def train(
    vae: AutoencoderKLQwenImage,
    masks: NDArray[np.uint8],
    steps: int,
    report: Callable[[int, float], None],
    *,
    decoder_only: bool = False,
    batch: int = 8,
    rate: float = 3e-3,
    seed: int = 0,
) -> None:
    """Train for so many steps.

    masks: uint8 (n, SIDE, SIDE). report: is called with the step and its loss, each step. decoder_only: the encoder
    stays as it is, so that what it made before stays valid.
    """
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    undo = flatten(vae)
    trained = [*vae.decoder.parameters(), *vae.post_quant_conv.parameters()] if decoder_only else [*vae.parameters()]
    optimizer = torch.optim.AdamW(trained, rate, weight_decay=0, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        picked = masks[random.integers(0, len(masks), batch)]
        picture = pixels(coloured(picked, random_inks(batch, random)))
        with torch.set_grad_enabled(not decoder_only):
            mean = vae.quant_conv(vae.encoder(picture))[:, :CHANNELS]
        noisy = mean + torch.randn_like(mean) * mean.detach().std() * _NOISE
        drawn = vae.decoder(vae.post_quant_conv(noisy))
        error = (drawn - picture) * torch.where(picture.amin(1, keepdim=True) < 1, 2.0, 1.0)  # most of it is white
        loss = error.abs().mean() + error.square().mean() + 1e-4 * mean.square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        report(step, loss.item())
    for each in undo:
        each()


@torch.no_grad()
def normalise(vae: AutoencoderKLQwenImage, masks: NDArray[np.uint8], seed: int = 0) -> None:
    """Write the mean and the deviation of the drawings' latents into the VAE's configuration."""
    random = np.random.default_rng(seed)
    latents = encode(vae, pixels(coloured(masks, random_inks(len(masks), random))))
    dims = (0, 2, 3, 4)
    vae.register_to_config(latents_mean=latents.mean(dims).tolist(), latents_std=latents.std(dims).tolist())


@torch.no_grad()
def encode(vae: AutoencoderKLQwenImage, pictures: Tensor) -> Tensor:
    """Return the latents, not normalised: float32 (n, CHANNELS, 1, height, width)."""
    return torch.cat([vae.encode(each).latent_dist.mode() for each in pictures.split(32)])
