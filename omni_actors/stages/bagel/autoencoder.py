"""The autoencoder of pictures: convolutions with residual blocks, as in FLUX. Parameter names are the checkpoint's."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

from omni_actors.stages.bagel.config import AutoencoderConfig


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-6)


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = _norm(outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        if inputs != outputs:
            self.nin_shortcut = nn.Conv2d(inputs, outputs, 1)
        self._widens = inputs != outputs

    def forward(self, states: Tensor) -> Tensor:
        change = self.conv1(functional.silu(self.norm1(states)))
        change = self.conv2(functional.silu(self.norm2(change)))
        kept = self.nin_shortcut(states) if self._widens else states
        return kept + change  # type: ignore[no-any-return]


class _Attention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, states: Tensor) -> Tensor:
        normed = self.norm(states)
        queries, keys, values = (
            project(normed).flatten(2).transpose(1, 2)[:, None] for project in (self.q, self.k, self.v)
        )
        seen = functional.scaled_dot_product_attention(queries, keys, values)[:, 0]
        return states + self.proj_out(seen.transpose(1, 2).reshape(states.shape))  # type: ignore[no-any-return]


class _Middle(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1, self.attn_1 = _Residual(channels, channels), _Attention(channels)
        self.block_2 = _Residual(channels, channels)

    def forward(self, states: Tensor) -> Tensor:
        result: Tensor = self.block_2(self.attn_1(self.block_1(states)))
        return result


class _Resample(nn.Module):
    """Half or twice the size."""

    def __init__(self, channels: int, *, down: bool) -> None:
        super().__init__()
        self._down = down
        self.conv = nn.Conv2d(channels, channels, 3, stride=2) if down else nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, states: Tensor) -> Tensor:
        if self._down:
            states = functional.pad(states, (0, 1, 0, 1))
        else:
            states = functional.interpolate(states, scale_factor=2.0, mode="nearest")
        result: Tensor = self.conv(states)
        return result


class _Level(nn.Module):
    def __init__(self, channels: list[int], *, resample: str | None) -> None:
        super().__init__()
        pairs = itertools.pairwise(channels)
        self.block = nn.ModuleList(_Residual(inputs, outputs) for inputs, outputs in pairs)
        self._resample = resample
        if resample:
            self.add_module(resample, _Resample(channels[-1], down=resample == "downsample"))

    def forward(self, states: Tensor) -> Tensor:
        for block in self.block:
            states = block(states)
        result: Tensor = self.get_submodule(self._resample)(states) if self._resample else states
        return result


class Encoder(nn.Module):
    """Pictures to latents."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        self._config = config
        widths = [config.ch * factor for factor in config.ch_mult]
        last = len(widths) - 1
        self.conv_in = nn.Conv2d(3, config.ch, 3, padding=1)
        self.down = nn.ModuleList(
            _Level(
                [before, *[width] * config.num_res_blocks],
                resample=None if level == last else "downsample",
            )
            for level, (before, width) in enumerate(zip([config.ch, *widths], widths, strict=False))
        )
        self.mid, self.norm_out = _Middle(widths[-1]), _norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], 2 * config.z_channels, 3, padding=1)

    def forward(self, pixels: Tensor, noise: Tensor) -> Tensor:
        """Return a sample of the latents, (1, channels, h, w), normalised.

        pixels: (1, 3, height, width) in [-1, 1]. noise: (1, channels, h, w), normally distributed.
        """
        states = self.conv_in(pixels)
        for level in self.down:
            states = level(states)
        mean, log_variance = self.conv_out(functional.silu(self.norm_out(self.mid(states)))).chunk(2, dim=1)
        sample = mean + torch.exp(0.5 * log_variance) * noise
        return self._config.scale_factor * (sample - self._config.shift_factor)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Latents to pictures."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        self._config = config
        widths = [config.ch * factor for factor in config.ch_mult]
        self.conv_in = nn.Conv2d(config.z_channels, widths[-1], 3, padding=1)
        self.mid = _Middle(widths[-1])
        self.up = nn.ModuleList(
            _Level(
                [before, *[width] * (config.num_res_blocks + 1)],
                resample="upsample" if level else None,
            )
            for level, (before, width) in enumerate(zip([*widths[1:], widths[-1]], widths, strict=True))
        )
        self.norm_out = _norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        """Return (1, 3, height, width), about in [-1, 1]. latents: (1, channels, h, w), normalised."""
        states = self.conv_in(latents / self._config.scale_factor + self._config.shift_factor)
        states = self.mid(states)
        for level in reversed(self.up):
            states = level(states)
        result: Tensor = self.conv_out(functional.silu(self.norm_out(states)))
        return result
