"""One half of Qwen-Image's VAE: the encoder or the decoder, without the weights of the other half."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from diffusers import AutoencoderKLQwenImage
from torch import Tensor, nn

from omni_actors.stages import weights
from omni_actors.stages.base import StageContext
from omni_actors.stages.bounds import Dtype
from omni_actors.stages.checkpoint import WrongCheckpoint

Half: TypeAlias = Literal["encoder", "decoder"]
MODULES: dict[Half, tuple[str, str]] = {
    "encoder": ("encoder", "quant_conv"),
    "decoder": ("decoder", "post_quant_conv"),
}


class HalfVae:
    """The encoder or the decoder of the VAE in ``context.model``, a directory of diffusers.

    tiling: as in the stage's options.
    Side effects: from now on torch computes with the stage's number of threads, and with deterministic algorithms of
    cuDNN in this process, so that a replay gives the same picture.
    Raises OSError, WrongCheckpoint.
    """

    def __init__(self, context: StageContext, half: Half, dtype: Dtype, *, tiling: bool) -> None:
        torch.set_num_threads(context.threads)
        torch.backends.cudnn.deterministic = True
        context.report(f"reading the weights of the VAE's {half}")
        self._directory, self._half = context.model_directory / "vae", half
        self.model: Any = _without_weights(self._directory, half)
        self._load(getattr(torch, dtype), torch.device(context.device))
        if tiling:
            self.model.enable_tiling()
        config = self.model.config
        self.pixels: int = self.model.spatial_compression_ratio
        """Pixels of a latent's side."""
        self.channels: int = config.z_dim
        """Channels of the latents."""
        self._mean, self._std = torch.tensor(config.latents_mean), torch.tensor(config.latents_std)

    @property
    def device(self) -> torch.device:
        """The device on which it computes."""
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """In which it computes."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    def mean(self) -> Tensor:
        """Return the mean of the latents by channel, (1, channels, 1, 1, 1), in the model's dtype."""
        return self._mean.view(1, -1, 1, 1, 1).to(self.device, self.dtype)

    def std(self) -> Tensor:
        """Return their standard deviation, in the same form."""
        return self._std.view(1, -1, 1, 1, 1).to(self.device, self.dtype)

    def inverse_std(self) -> Tensor:
        """Return one over the standard deviation, in the same form."""
        return 1.0 / self._std.view(1, -1, 1, 1, 1).to(self.device, self.dtype)

    def replace(self, files: weights.Files) -> dict[str, Any]:
        """Replace weights, as ``Engine._replace_weights`` says; those of the other half are passed over.

        Raises InvalidRequest: a file or a tensor is wrong; nothing has changed.
        """
        own = weights.shapes(weights.checkpoint_files(self._directory))
        weights.check(weights.shapes(files), own)
        tensors = {name: tensor for name, tensor in weights.read(files).items() if _is_of(name, self._half)}
        targets: dict[str, Tensor] = self.model.state_dict()
        weights.check({name: tuple(tensor.shape) for name, tensor in tensors.items()}, own)
        weights.check_floating(tensors)
        with torch.no_grad():
            for name, tensor in tensors.items():
                targets[name].copy_(tensor)
        return {"updated": len(tensors), "complete": tensors.keys() >= targets.keys()}

    def _load(self, dtype: torch.dtype, device: torch.device) -> None:
        tensors = {
            name: tensor.to(device, dtype)
            for name, tensor in weights.read(weights.checkpoint_files(self._directory)).items()
            if _is_of(name, self._half)
        }
        try:
            self.model.load_state_dict(tensors, assign=True)
        except RuntimeError as error:  # names or shapes
            raise WrongCheckpoint(self._directory.parent, self._half, str(error)) from error
        self.model.eval().requires_grad_(requires_grad=False)


def _is_of(name: str, half: Half) -> bool:
    return name.startswith(tuple(f"{module}." for module in MODULES[half]))


def _without_weights(directory: Any, half: Half) -> Any:
    """Return the model without memory, and without the modules of the other half."""
    network: Any = AutoencoderKLQwenImage
    config = network.load_config(directory, local_files_only=True)
    with torch.device("meta"):
        model = network.from_config(config)
    for other in MODULES["decoder" if half == "encoder" else "encoder"]:
        setattr(model, other, nn.Module())  # the model walks through the modules of both halves
    return model
