"""The input of one request: a prompt and pictures."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from PIL import Image

from omni_actors.stages.base import Chunk, InvalidRequest
from omni_actors.stages.diffusers.options import PROMPT_CHARACTERS, DiffusersOptions
from omni_actors.stages.multimodal.conversation import ConversationData, Index
from omni_actors.stages.multimodal.images import check_pixels, decode_image
from omni_actors.stages.refusal import beyond_context, request_work, validated
from omni_actors.stages.sources import OpenSources


class _PictureData(msgspec.Struct, frozen=True):
    """The ``data`` of a chunk with a picture."""

    index: Index = 0


class Prompt:
    """Collects the input of one request. It is complete when every source has sent its last chunk."""

    def __init__(self, sources: Sequence[str], options: DiffusersOptions) -> None:
        self._open, self._options = OpenSources(sources), options
        self._text: str | None = None
        self.images: list[Image.Image] = []
        """The pictures that have arrived."""

    @property
    def complete(self) -> bool:
        return not self._open

    @property
    def text(self) -> str:
        """The text of the last message of the user. Raises InvalidRequest: there is none."""
        if self._text is None:
            raise InvalidRequest("messages: a message of the user with a text was expected", param="messages")
        return self._text

    def feed(self, chunk: Chunk) -> None:
        """Take a chunk. Raises InvalidRequest."""
        messages = validated(chunk.data, ConversationData).messages
        for texts in (message.texts for message in messages if message.role == "user" and message.texts):
            self._text = "\n".join(texts)
        if self._text is not None and len(self._text) > PROMPT_CHARACTERS:
            found = f"messages: the prompt has {len(self._text)} characters; the limit is {PROMPT_CHARACTERS}"
            raise beyond_context(found)
        if chunk.tensors.keys() & {"image", "encoded_image"}:
            self._take_picture(chunk)
        self._open.update(chunk)

    def _take_picture(self, chunk: Chunk) -> None:
        index = validated(chunk.data, _PictureData).index
        if len(self.images) == self._options.max_images:
            message = f"image: more than {self._options.max_images} pictures in a request"
            raise InvalidRequest(message, param="image")
        pixels = chunk.tensors.get("image")
        if pixels is None:
            with request_work("image"):
                encoded = bytes(chunk.tensors["encoded_image"].data)
            decoded = decode_image(encoded, index, self._options.max_pixels)
        else:
            if pixels.dtype != "uint8" or len(pixels.shape) != 3 or pixels.shape[2] != 3 or not pixels.nbytes:
                message = f"image {index}: uint8 (height, width, 3) was expected, not {pixels.dtype} {pixels.shape}"
                raise InvalidRequest(message, param="image")
            check_pixels(index, pixels.shape[1], pixels.shape[0], self._options.max_pixels)
            decoded = np.array(pixels.numpy())
        self.images.append(Image.fromarray(decoded))
