"""Requests to the denoiser, and diffusers' pipelines that make the same pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.support.engine_driver import Driver
from tiny_models import qwen_image as tiny

TEXT, PICTURES = "text_encoder", "image_encoder"


def states(rows: int, seed: int = 0) -> torch.Tensor:
    """Hidden states of a prompt, (rows, width)."""
    return torch.randn(rows, tiny.WIDTH, generator=torch.Generator().manual_seed(seed))


class Request:
    """What a denoiser is asked, and diffusers' pipelines beside it.

    params: of the engine. prompt, negative: hidden states. pictures: normalised latents (channels, height, width).
    """

    def __init__(
        self,
        prompt: torch.Tensor,
        negative: torch.Tensor | None = None,
        pictures: tuple[torch.Tensor, ...] = (),
        **params: Any,
    ) -> None:
        self.prompt, self.negative, self.pictures = prompt, negative, pictures
        self.params = {"size": "64x64", "steps": 4, "guidance": 4.0, "seed": 0, **params}

    def submit(self, driver: Driver, request_id: int = 1, **resumption: Any) -> None:
        sources = (TEXT, PICTURES) if self.pictures else (TEXT,)
        driver.start(request_id, sources, **resumption, **self.params)
        several = len(self.pictures) > 1
        named = {f"latents.{n}" if several else "latents": each.numpy() for n, each in enumerate(self.pictures)}
        if named:
            driver.feed(request_id, {}, named, last=True, source=PICTURES)
        negative = {} if self.negative is None else {"negative": self.negative.numpy()}
        driver.feed(request_id, {}, {"prompt": self.prompt.numpy(), **negative}, last=True, source=TEXT)

    def alone(self, driver: Driver) -> np.ndarray[Any, Any]:
        """The latents of the picture, of a batch of this request."""
        self.submit(driver)
        return final(driver.run()[1])

    def reference(self, pipeline: Any, **more: Any) -> np.ndarray[Any, Any]:
        """The latents that a pipeline of diffusers gives."""
        width, height = map(int, self.params["size"].split("x"))
        given: dict[str, Any] = {"prompt_embeds": self.prompt[None], "prompt_embeds_mask": mask(self.prompt)}
        if self.negative is not None:
            given |= {"negative_prompt_embeds": self.negative[None], "negative_prompt_embeds_mask": mask(self.negative)}
        packed = pipeline(
            **given,
            **more,
            height=height,
            width=width,
            num_inference_steps=self.params["steps"],
            true_cfg_scale=self.params["guidance"],
            generator=torch.Generator().manual_seed(self.params["seed"]),
            output_type="latent",
        ).images
        unpacked = pipeline._unpack_latents(packed, height, width, pipeline.vae_scale_factor)
        latents: np.ndarray[Any, Any] = unpacked[0, :, 0].float().numpy()
        return latents


def mask(prompt: torch.Tensor) -> torch.Tensor:
    return torch.ones(1, len(prompt), dtype=torch.long)


def final(outputs: list[Any]) -> np.ndarray[Any, Any]:
    """The latents of the last one of a request's outputs."""
    assert outputs[-1].last
    assert outputs[-1].data["final"]
    latents: np.ndarray[Any, Any] = outputs[-1].tensors["latents"]
    return latents
