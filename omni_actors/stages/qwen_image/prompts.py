"""From a request's prompt and pictures to the input of Qwen-Image's text encoder.

The templates are those with which the models were trained, and as diffusers has them. The first rows of a template are
dropped from the hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.diffusion.pipeline_index import EDIT, EDIT_PLUS, PipelineIndex
from omni_actors.stages.diffusion.prompt import user_pictures, user_text
from omni_actors.stages.multimodal.prompt import OmniPrompt
from omni_actors.stages.qwen_image.options import TextEncoderOptions
from omni_actors.stages.qwen_image.pictures import scaled_size
from omni_actors.stages.refusal import beyond_context

PLACEHOLDER = "<|image_pad|>"
"""The token that stands once for each row of a picture."""


class Template(NamedTuple):
    """How a model's prompts are written.

    system: the system message. dropped: the rows that are dropped. picture: the text of a picture, where {} is its
    number; empty for a model without pictures. area: pixels to which a picture is scaled.
    """

    system: str
    dropped: int
    picture: str = ""
    area: int = 0

    def written(self, prompt: str, pictures: int) -> str:
        """Return the whole text. pictures: their number."""
        shown = "".join(self.picture.format(number + 1) for number in range(pictures))
        return (
            f"<|im_start|>system\n{self.system}<|im_end|>\n<|im_start|>user\n{shown}{prompt}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )


_DESCRIBE = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
    "objects and background:"
)
_CHANGE = (
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how "
    "the user's text instruction should alter or modify the image. Generate a new image that meets the user's "
    "requirements while maintaining consistency with the original input where appropriate."
)
_PICTURE = f"<|vision_start|>{PLACEHOLDER}<|vision_end|>"
TEMPLATES: Mapping[str, Template] = {
    EDIT: Template(_CHANGE, 64, _PICTURE, 1024 * 1024),
    EDIT_PLUS: Template(_CHANGE, 64, f"Picture {{}}: {_PICTURE}", 384 * 384),
}
"""The template of each class of pipelines that looks at pictures."""
TEXT_ONLY = Template(_DESCRIBE, 34)


class EncoderInput(msgspec.Struct, frozen=True):
    """One prompt. name: of its rows in the output. tensors: by the names of the forward's arguments."""

    name: str
    tensors: dict[str, Tensor]


class PromptReader:
    """Makes the encoder's input, with the tokenizer and the picture processor of one checkpoint.

    directory: of diffusers. tokenizer: its directory, if it is another one. Raises OSError: files cannot be read.
    """

    def __init__(
        self, directory: Path, index: PipelineIndex, options: TextEncoderOptions, tokenizer: Path | None
    ) -> None:
        self._options, self.template = options, TEMPLATES.get(index.class_name, TEXT_ONLY)
        self._most = options.max_images if index.class_name == EDIT_PLUS else 1
        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            tokenizer or directory / "tokenizer", local_files_only=True
        )
        self._longest = max(map(len, self._tokenizer.get_vocab()))
        self._pictures: Any = None
        if index.looks_at_pictures:
            self._pictures = Qwen2VLImageProcessorPil.from_pretrained(directory / "processor", local_files_only=True)

    def read(self, prompt: OmniPrompt, negative: str | None) -> list[EncoderInput]:
        """Return the input for the prompt, and for the negative one unless it is None. Raises InvalidRequest."""
        texts = {"prompt": user_text(prompt)} | ({} if negative is None else {"negative": negative})
        for name, text in texts.items():
            self._check_length(name, math.ceil(len(text) / self._longest))
        pictures = user_pictures(prompt, self._most, self._options.image_pixels)
        if bool(pictures) != (self._pictures is not None):
            found = "no pictures were expected" if pictures else "a picture was expected"
            raise InvalidRequest(f"image: {found}", param="image")
        seen = self._seen(pictures) if pictures else {}
        return [EncoderInput(name, self._tokens(name, text, seen)) for name, text in texts.items()]

    def _seen(self, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        area = self._options.image_area or self.template.area
        scaled = [each.resize(scaled_size(each, area), Image.Resampling.LANCZOS) for each in pictures]
        return dict(self._pictures(images=scaled, return_tensors="pt"))

    def _tokens(self, name: str, text: str, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        merged = self._pictures.merge_size**2 if seen else 1
        rows = [int(grid.prod()) // merged for grid in seen.get("image_grid_thw", ())]
        written = self.template.written(text, len(rows))
        if seen:
            before, *parts = written.split(PLACEHOLDER)
            if len(parts) != len(rows):
                param = _param(name)
                raise InvalidRequest(f"{param}: it must not have the text {PLACEHOLDER}", param=param)
            written = before + "".join(PLACEHOLDER * n + part for n, part in zip(rows, parts, strict=True))
        ids = self._tokenizer([written], return_tensors="pt").input_ids
        self._check_length(name, ids.shape[1] - self.template.dropped)
        # No mm_token_type_ids, as in diffusers: with them, the picture's tokens would have other positions.
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **seen}

    def _check_length(self, name: str, rows: int) -> None:
        if rows > self._options.max_prompt:
            param = _param(name)
            message = f"{param}: it has {rows} tokens or more; the limit is {self._options.max_prompt}"
            raise beyond_context(message, param)


def _param(name: str) -> str:
    return "negative_prompt" if name == "negative" else "prompt"
