"""diffusers' own pipelines of Qwen-Image, to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image
from transformers import AutoTokenizer, Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class _Processor(Qwen2_5_VLProcessor):  # type: ignore[misc]
    """transformers' processor without the one for videos, which needs torchvision."""

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        if name == "video_processor":
            return type(argument)
        return super().check_argument_for_proper_class(name, argument)


def open_pipeline(directory: Path, name: str) -> Any:
    """Return a pipeline on the weights in a directory. name: its class in diffusers."""
    parts: dict[str, Any] = {}
    if "Edit" in name:
        images = Qwen2VLImageProcessorPil.from_pretrained(directory / "processor")
        tokenizer = AutoTokenizer.from_pretrained(directory / "tokenizer")
        parts["processor"] = _Processor(images, tokenizer, object())
    opened = getattr(diffusers, name).from_pretrained(directory, **parts)
    opened.set_progress_bar_config(disable=True)
    return opened


def scale_to(monkeypatch: pytest.MonkeyPatch, areas: dict[int, int]) -> None:
    """Let diffusers scale pictures to other areas than those of the real models. areas: from the one to the other."""
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        original = module.calculate_dimensions
        monkeypatch.setattr(
            module,
            "calculate_dimensions",
            lambda area, ratio, original=original: original(areas[area], ratio),
        )


def drawn(
    pipeline: Any, prompt: str, *, seed: int, size: tuple[int, int] | None, steps: int, **more: Any
) -> tuple[np.ndarray[Any, Any], Pixels]:
    """Return the latents (channels, height, width) before the decoder, and the picture.

    size: width and height. more: further arguments of the pipeline.
    """
    width, height = size or (None, None)
    asked = {"prompt": prompt, "width": width, "height": height, "num_inference_steps": steps, **more}
    packed = pipeline(**asked, generator=torch.Generator().manual_seed(seed), output_type="latent").images
    [picture] = pipeline(**asked, generator=torch.Generator().manual_seed(seed)).images
    pixels = np.asarray(picture)
    scale = pipeline.vae_scale_factor
    latents = pipeline._unpack_latents(packed, pixels.shape[0], pixels.shape[1], scale)
    return latents[0, :, 0].numpy(), pixels


def photo(seed: int, width: int = 60, height: int = 40) -> Image.Image:
    """Return a picture of a few random areas."""
    small = np.random.default_rng(seed).integers(0, 255, (4, 6, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def similarity(one: Pixels, other: Pixels) -> float:
    """Return the structural similarity of two pictures (Wang et al., 2004): means over windows of 7 x 7 pixels."""
    x, y = (np.asarray(Image.fromarray(each).convert("L"), np.float64) for each in (one, other))
    windows = np.lib.stride_tricks.sliding_window_view
    a, b = (windows(each, (7, 7)).reshape(-1, 49) for each in (x, y))
    means, others = a.mean(1), b.mean(1)
    covariance = ((a - means[:, None]) * (b - others[:, None])).sum(1) / 48
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    luminance = (2 * means * others + c1) / (means**2 + others**2 + c1)
    structure = (2 * covariance + c2) / (a.var(1, ddof=1) + b.var(1, ddof=1) + c2)
    return float((luminance * structure).mean())
