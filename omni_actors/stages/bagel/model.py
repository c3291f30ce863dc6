"""The networks of one stage, with the weights that it needs of the checkpoint.

Rules
1. A stage that reads holds the language model, its output layer, the vision tower and the encoder of the autoencoder.
   A stage that draws holds the language model and the decoder of the autoencoder. One stage may do both.
2. Only the needed tensors of ``ema.safetensors`` and ``ae.safetensors`` are read, one by one, to the stage's device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from omni_actors.stages import weights
from omni_actors.stages.adapters.batched import BatchedAdapters
from omni_actors.stages.bagel import autoencoder, pictures
from omni_actors.stages.bagel.config import BagelConfig, read
from omni_actors.stages.bagel.language import Experts, LanguageModel
from omni_actors.stages.bagel.vision import Connector, VisionTower
from omni_actors.stages.base import StageContext
from omni_actors.stages.bounds import Dtype
from omni_actors.stages.checkpoint import WrongCheckpoint
from omni_actors.stages.multimodal.prompt import Pixels

_FREQUENCIES = 256


class Marks(NamedTuple):
    """The token ids that mark texts and pictures."""

    text_start: int
    text_end: int
    picture_start: int
    picture_end: int


class _Places(nn.Module):
    """A table of embeddings of places in a picture."""

    def __init__(self, side: int, hidden: int) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.empty(side**2, hidden))

    def forward(self, places: Tensor) -> Tensor:
        return self.pos_embed[places]


class _Times(nn.Module):
    """Embeddings of times between 0 (a picture) and 1 (noise)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(_FREQUENCIES, hidden), nn.SiLU(), nn.Linear(hidden, hidden))

    def forward(self, times: Tensor) -> Tensor:
        half = _FREQUENCIES // 2
        steps = torch.arange(half, dtype=torch.float32, device=times.device)
        angles = times[:, None].float() * torch.exp(-math.log(10000) * steps / half)
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
        first: Any = self.mlp[0]
        result: Tensor = self.mlp(waves.to(first.weight.dtype))
        return result


class BagelModel(nn.Module):
    """The networks. reads, draws: what the stage does (rule 1). Parameter names are the checkpoint's."""

    def __init__(self, config: BagelConfig, *, reads: bool, draws: bool) -> None:
        super().__init__()
        self.config = config
        hidden = config.language.hidden_size
        self.language_model = LanguageModel(config.language, writes=reads)
        self.time_embedder = _Times(hidden)
        self.latent_pos_embed = _Places(config.max_latent_size, hidden)
        self.vae2llm = nn.Linear(config.token_channels, hidden)
        if reads:
            self.vit_model = VisionTower(config.vision)
            self.connector = Connector(config.vision.hidden_size, hidden)
            self.vit_pos_embed = _Places(config.vit_max_num_patch_per_side, hidden)
            self.encoder = autoencoder.Encoder(config.vae_config)
        if draws:
            self.llm2vae = nn.Linear(hidden, config.token_channels)
            self.decoder = autoencoder.Decoder(config.vae_config)

    @property
    def device(self) -> torch.device:
        return self.vae2llm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.vae2llm.weight.dtype

    def embed(self, tokens: list[int]) -> Tensor:
        """Return the embeddings of tokens, (n, hidden)."""
        embeds: Tensor = self.language_model.model.embed_tokens(torch.tensor(tokens, device=self.device))
        return embeds

    def embed_vision(self, pixels: Pixels) -> Tensor:
        """Return what the vision tower sees, (n, hidden). pixels: resized for it, uint8 (height, width, 3)."""
        size = self.config.vision.patch_size
        rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
        where = pictures.places(rows, columns, self.config.vit_max_num_patch_per_side).to(self.device)
        patches = pictures.cut(pictures.normalised(pixels), size).to(self.device, self.dtype)
        seen: Tensor = self.connector(self.vit_model(patches, where)) + self.vit_pos_embed(where)
        return seen

    def encode(self, pixels: Pixels, noise: Tensor) -> Tensor:
        """Return a picture's latent tokens, (n, channels). pixels: resized. noise: as ``latent_shape``, float32."""
        picture = pictures.normalised(pixels)[None].to(self.device, self.dtype)
        latents: Tensor = self.encoder(picture, noise[None].to(self.device, self.dtype))
        return pictures.cut(latents[0], self.config.latent_patch_size)

    def latent_shape(self, width: int, height: int) -> tuple[int, int, int]:
        """Return channels, height and width of the latents of a picture of this size in pixels."""
        downsample = self.config.vae_config.downsample
        return self.config.vae_config.z_channels, height // downsample, width // downsample

    def embed_latents(self, tokens: Tensor, time: float, width: int, height: int) -> Tensor:
        """Return the embeddings, (n, hidden), of the latent tokens of a picture of this size at this time."""
        size = self.config.token_pixels
        where = pictures.places(height // size, width // size, self.config.max_latent_size).to(self.device)
        times = self.time_embedder(torch.tensor([time], device=self.device))
        embeds: Tensor = self.vae2llm(tokens.to(self.device, self.dtype)) + times + self.latent_pos_embed(where)
        return embeds

    def decode(self, tokens: Tensor, width: int, height: int) -> Tensor:
        """Return the picture, uint8 (height, width, 3) on the host, of latent tokens (n, channels)."""
        size = self.config.token_pixels
        latents = pictures.joined(tokens, self.config.latent_patch_size, height // size, width // size)
        pixels: Tensor = self.decoder(latents[None].to(self.device, self.dtype))[0].float()
        return ((pixels * 0.5 + 0.5).clamp(0, 1).permute(1, 2, 0) * 255).to(torch.uint8).cpu().contiguous()

    def picture_experts(self, latents: int) -> Experts:
        """Return the experts of a start mark, so many latent tokens and an end mark."""
        marks = torch.tensor([0, latents + 1], device=self.device)
        return Experts(marks, torch.arange(1, latents + 1, device=self.device))


def marks(tokenizer: object) -> Marks:
    """Return the marks of a transformers tokenizer. Raises ValueError: it lacks one."""
    names = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()  # type: ignore[attr-defined]
    if missing := [name for name in names if name not in vocabulary]:
        raise ValueError(f"the tokenizer has no token {missing[0]}")
    return Marks(*(vocabulary[name] for name in names))


def load(context: StageContext, dtype: Dtype, *, reads: bool, draws: bool) -> BagelModel:
    """Load the networks of a stage, in evaluation mode. Nothing is downloaded.

    Side effects: as ``checkpoint.load_part``.
    Raises WrongCheckpoint: a tensor is missing or does not fit. OSError, ValueError: a file cannot be read.
    """
    torch.set_num_threads(context.threads)
    torch.backends.cudnn.deterministic = True
    if dtype == "float32":
        torch.backends.cudnn.allow_tf32 = False
    config = read(context.model_directory)
    with torch.device("meta"):
        model = BagelModel(config, reads=reads, draws=draws)
    wanted = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    tensors: dict[str, Tensor] = {}
    for file in ("ema.safetensors", "ae.safetensors"):
        context.report(f"reading {file}")
        with safe_open(context.model_directory / file, "pt", device=context.device) as source:
            for name in sorted(wanted.keys() & set(source.keys())):
                tensors[name] = source.get_tensor(name).to(getattr(torch, dtype))
    for name, shape in wanted.items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            found = tuple(tensors[name].shape) if name in tensors else None
            raise WrongCheckpoint(context.model_directory, "bagel", f"{name}: shape {shape} was expected, not {found}")
    model.load_state_dict(tensors, assign=True)
    return model.eval().requires_grad_(requires_grad=False)


def adapters(model: BagelModel, idle: int) -> BatchedAdapters:
    """Return the store of a stage's LoRA adapters. idle: as in ``BatchedAdapters``."""
    with torch.device("meta"):
        whole = BagelModel(model.config, reads=True, draws=True)
    linears = {name for name, module in whole.named_modules() if isinstance(module, nn.Linear)}
    return BatchedAdapters(model, part="", idle=idle, elsewhere=linears - {name for name, _ in model.named_modules()})


def replace_weights(model: BagelModel, files: weights.Files) -> dict[str, Any]:
    """Replace weights in place by those of files, which may have tensors of other stages too.

    Returns and raises as ``autoregressive.weights.replace_weights``.
    """
    with torch.device("meta"):
        whole = BagelModel(model.config, reads=True, draws=True).state_dict()
    tensors = weights.read(files)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    weights.check(found, {name: tuple(tensor.shape) for name, tensor in whole.items()})
    weights.check_floating(tensors)
    own = model.state_dict()
    used = tensors.keys() & own.keys()
    with torch.no_grad():
        for name in used:
            own[name].copy_(tensors[name])
    return {"updated": len(used), "complete": used == own.keys()}
