"""What engines that make pictures read of a conversation: the text of the user, and pictures."""

from __future__ import annotations

from collections.abc import Mapping

from PIL import Image

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.multimodal.images import check_size, decode_image
from omni_actors.stages.multimodal.limits import Deadline, MediaLimits
from omni_actors.stages.multimodal.prompt import OmniPrompt, Pixels

DECODE_S = MediaLimits().decode_s
"""Seconds for decoding the pictures of a request."""


def user_text(prompt: OmniPrompt) -> str:
    """Return the text of the last message of the user that has one. Raises InvalidRequest: there is none."""
    if prompt.raw:
        raise InvalidRequest("prompt: this model reads conversations only", param="prompt")
    texts = [message.texts for message in prompt.messages if message.role == "user" and message.texts]
    if not texts:
        raise InvalidRequest("messages: a message of the user with a text was expected", param="messages")
    return "\n".join(texts[-1])


def user_pictures(prompt: OmniPrompt, most: int, max_pixels: int) -> list[Image.Image]:
    """Return the pictures in order of their index.

    most: their largest number. max_pixels: the largest width times height of each, known before it is decoded.
    Raises InvalidRequest. There is sound or a video, a picture is wrong, or they take too long to decode.
    """
    media = prompt.media
    if media.audio or media.video:
        raise InvalidRequest("messages: this model takes text and pictures only", param="messages")
    if len(media.image) > most:
        raise InvalidRequest(f"image: found {len(media.image)} pictures; the limit is {most}", param="image")
    deadline = Deadline(DECODE_S)
    pictures = []
    for index in sorted(media.image):
        deadline.check("image", index)
        pictures.append(Image.fromarray(_pixels(index, media.image, max_pixels, deadline)))
    return pictures


def _pixels(index: int, pictures: Mapping[int, Pixels | bytes], max_pixels: int, deadline: Deadline) -> Pixels:
    content = pictures[index]
    if isinstance(content, bytes):
        return decode_image(content, index, max_pixels, deadline)
    height, width, _ = content.shape
    check_size(index, width, height, max_pixels)
    return content
