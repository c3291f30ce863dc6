"""The frames of a video to the patches of a vision encoder, as transformers' Qwen2VLVideoProcessor does it.

This needs no torchvision. The results are equal bit for bit, because torchvision resizes a uint8 tensor on the CPU with
torch's antialiased bicubic interpolation too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import BatchFeature

BICUBIC = 3


class FrameProcessor:
    """Replaces the video processor in transformers' omni processors.

    config: the checkpoint's configuration of its video processor.
    """

    model_input_names = ("pixel_values_videos", "video_grid_thw")

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ValueError: the configuration asks for another interpolation than bicubic."""
        if config.get("resample", BICUBIC) != BICUBIC:
            raise ValueError(f"resample of videos: found {config['resample']!r}; accepted: {BICUBIC}, bicubic")
        self.patch_size: int = config.get("patch_size", 14)
        self.temporal_patch_size: int = config.get("temporal_patch_size", 2)
        self.merge_size: int = config.get("merge_size", 2)
        scale = 1 / config.get("rescale_factor", 1 / 255)
        # The defaults are those of CLIP, as for all checkpoints of this family.
        self._mean = torch.tensor(config.get("image_mean") or (0.48145466, 0.4578275, 0.40821073)) * scale
        self._std = torch.tensor(config.get("image_std") or (0.26862954, 0.26130258, 0.27577711)) * scale

    def grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return the numbers of patches in time, height and width, for frames of their target size."""
        return -(-frames // self.temporal_patch_size), height // self.patch_size, width // self.patch_size

    def __call__(self, videos: Sequence[Tensor], **_: Any) -> BatchFeature:
        """Convert videos, uint8 (frames, height, width, 3) each, which ``decoding`` has resized.

        Returns ``pixel_values_videos`` and ``video_grid_thw``.
        """
        patches, grids = zip(*map(self._patches, videos), strict=True)
        return BatchFeature({"pixel_values_videos": torch.cat(patches), "video_grid_thw": np.array(grids)})

    def _patches(self, video: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        """Return float32 (patches, channels × temporal patch × patch²), in the order of merging, and the grid."""
        channels_first = video.permute(0, 3, 1, 2).to(torch.float32)
        pixels = (channels_first - self._mean[:, None, None]) / self._std[:, None, None]
        if missing := -len(pixels) % self.temporal_patch_size:
            pixels = torch.cat((pixels, pixels[-1:].expand(missing, -1, -1, -1)))
        t, h, w = grid = self.grid(len(pixels), pixels.shape[2], pixels.shape[3])
        merge, patch = self.merge_size, self.patch_size
        blocks = pixels.view(t, self.temporal_patch_size, 3, h // merge, merge, patch, w // merge, merge, patch)
        ordered = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return ordered.reshape(t * h * w, -1), grid


def resize(video: Tensor, height: int, width: int) -> Tensor:
    """Resize frames, uint8 (frames, height, width, 3), by antialiased bicubic interpolation."""
    if video.shape[1:3] == (height, width):
        return video
    channels_first = video.permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(
        channels_first, (height, width), mode="bicubic", antialias=True, align_corners=False
    )
    return resized.permute(0, 2, 3, 1)
