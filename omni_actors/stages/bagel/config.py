"""The configuration of a BAGEL checkpoint: ``config.json``, ``llm_config.json`` and ``vit_config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


class LanguageConfig(msgspec.Struct, frozen=True):
    """The language model: Qwen2 with query and key norms and two experts in each layer."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads


class VisionConfig(msgspec.Struct, frozen=True):
    """The vision tower, SigLIP. BAGEL leaves out its last layer."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    patch_size: int = 14
    image_size: int = 980
    num_channels: int = 3
    layer_norm_eps: float = 1e-6


class AutoencoderConfig(msgspec.Struct, frozen=True):
    """The autoencoder of pictures. The defaults are those of the released weights, whose files do not name them."""

    z_channels: int = 16
    ch: int = 128
    ch_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    scale_factor: float = 0.3611
    shift_factor: float = 0.1159

    @property
    def downsample(self) -> int:
        """Pixels of a latent's side."""
        return int(2 ** (len(self.ch_mult) - 1))


class BagelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The whole model."""

    vae_config: AutoencoderConfig = AutoencoderConfig()
    latent_patch_size: int = 2
    """Latents of a token's side."""
    max_latent_size: int = 64
    """Tokens of a picture's side, at most."""
    vit_max_num_patch_per_side: int = 70
    vae_image_size: tuple[int, int] = (512, 1024)
    """The least short side and the greatest long side, in pixels, to which a picture is resized before it is encoded
    as latents."""
    vit_image_size: tuple[int, int] = (224, 980)
    """The same for the vision tower."""
    language: LanguageConfig
    vision: VisionConfig

    @property
    def token_pixels(self) -> int:
        """Pixels of a latent token's side."""
        return self.vae_config.downsample * self.latent_patch_size

    @property
    def token_channels(self) -> int:
        """Numbers of a latent token."""
        return self.latent_patch_size**2 * self.vae_config.z_channels

    @property
    def longest_side(self) -> int:
        """The longest side of a picture in pixels."""
        return self.max_latent_size * self.token_pixels


class _Whole(msgspec.Struct, frozen=True):
    vae_config: AutoencoderConfig = AutoencoderConfig()
    latent_patch_size: int = 2
    max_latent_size: int = 64
    vit_max_num_patch_per_side: int = 70
    vae_image_size: tuple[int, int] = (512, 1024)
    vit_image_size: tuple[int, int] = (224, 980)


def read(directory: Path) -> BagelConfig:
    """Return the configuration of a checkpoint. Raises OSError and ValueError: a file is missing or wrong."""
    whole = _decoded(directory / "config.json", _Whole)
    return BagelConfig(
        language=_decoded(directory / "llm_config.json", LanguageConfig),
        vision=_decoded(directory / "vit_config.json", VisionConfig),
        **msgspec.structs.asdict(whole),
    )


def _decoded(file: Path, type: type[T]) -> T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=type)
    except msgspec.DecodeError as error:
        raise ValueError(f"{file}: {error}") from error
