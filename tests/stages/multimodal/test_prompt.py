from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omni_actors.stages.base import Chunk, InvalidRequest
from omni_actors.stages.multimodal.conversation import AudioPart, ImagePart, Message, VideoPart
from omni_actors.stages.multimodal.prompt import OmniPrompt
from ringbuf import Tensor
from tests.support.media_inputs import (
    Piece,
    bytes_of,
    feed,
    image,
    messages,
    noise,
    prompt_of,
    show,
    sound,
    video,
)

pytestmark = pytest.mark.voice  # the extra's libraries


def test_media_without_a_conversation_are_the_question() -> None:
    prompt = prompt_of(sound(0.2), sound(0.2, 1), image(4, 5, 1), image(4, 5, 0), video(2, 4, 5))
    parts = [AudioPart(0), AudioPart(1), ImagePart(0), ImagePart(1), VideoPart(0)]
    assert prompt.messages == [Message("user", parts)]


def test_a_conversation_may_have_several_chunks_and_precede_its_media() -> None:
    prompt = prompt_of(messages("hello"), messages([show("image")]), image(4, 5))
    assert prompt.messages == [Message("user", "hello"), Message("user", [ImagePart(0)])]


def test_an_empty_input_has_no_message() -> None:
    assert prompt_of(({}, {})).messages == []


def test_media_are_kept_as_sent() -> None:
    pieces: list[Piece] = [sound(0.2), sound(0.3), image(4, 5), ({"index": 1}, {"encoded_image": bytes_of(b"a file")})]
    frames, samples = noise(3, 4, 5, 3), sound(0.5)[1]["audio"]
    pieces += [
        ({"index": 0, "fps": 4, "sample_rate": 8000}, {"video": frames, "audio": samples}),
        ({"index": 2}, {"encoded_video": bytes_of(b"another")}),
    ]
    media = prompt_of(*pieces).media
    assert np.array_equal(
        media.audio[0].resampled(16_000), np.concatenate([pieces[0][1]["audio"], pieces[1][1]["audio"]])
    )
    assert np.array_equal(media.image[0], pieces[2][1]["image"])
    assert media.image[1] == b"a file"
    assert np.array_equal(media.video[0].content, frames)
    assert media.video[0].fps == 4
    assert media.video[0].audio is not None
    assert media.video[0].audio.duration_s == 1.0
    assert media.video[2].content == b"another"


def test_a_prompt_is_complete_when_every_source_has_ended() -> None:
    prompt = OmniPrompt(("client", "ear"))
    assert not prompt.feed(Chunk(source="ear", seq=0, last=True, tensors={}, data={}))
    assert not prompt.feed(Chunk(source="client", seq=0, last=False, tensors={}, data={}))
    assert prompt.feed(Chunk(source="client", seq=1, last=True, tensors={}, data={}))


BFLOAT16 = Tensor("bfloat16", (2, 2, 3), bytes(24))


@pytest.mark.parametrize(
    ("data", "tensors", "param", "reason"),
    [
        ({"index": 0}, {"image": noise(4, 5)}, "image", "uint8"),
        ({"index": 0}, {"image": noise(4, 5, 4)}, "image", "uint8"),
        ({"index": 0}, {"image": noise(0, 5, 3)}, "image", "uint8"),
        ({"index": 0}, {"image": noise(4, 5, 3).astype(np.float32)}, "image", "float32"),
        ({"index": 0}, {"image": BFLOAT16}, "image", "bfloat16"),
        ({"index": 0}, {"encoded_image": noise(4, 5)}, "image", "bytes"),
        ({"index": 0}, {"encoded_image": noise(0)}, "image", "bytes"),
        ({"index": -1}, {"image": noise(4, 5, 3)}, "index", ">= 0"),
        ({"index": 0, "fps": 2}, {"video": noise(4, 5, 3)}, "video", "uint8"),
        ({"index": 0}, {"video": noise(2, 4, 5, 3)}, "video", "fps"),
        ({"index": 0, "fps": 0}, {"video": noise(2, 4, 5, 3)}, "fps", "> 0"),
        ({"index": 0, "fps": float("nan")}, {"video": noise(2, 4, 5, 3)}, "fps", "> 0"),
        ({"index": 0, "fps": 2}, {"video": noise(2, 4, 5, 3), "audio": np.zeros(9, np.float32)}, "audio", "rate"),
        ({"index": 0, "sample_rate": 16_000}, {"audio": np.zeros(9, np.float32)}, "audio", "too short"),
        ({"messages": [{"role": "user", "content": [{"type": "smell", "index": 0}]}]}, {}, "messages", "smell"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, {}, "messages", "index"),
    ],
)
def test_a_malformed_chunk_is_refused(data: Any, tensors: Any, param: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        feed(OmniPrompt(("client",)), (data, tensors))
    assert str(refusal.value.param).partition("[")[0] == param


@pytest.mark.parametrize("piece", [image(4, 5), video(2, 4, 5)])
def test_an_index_is_used_once(piece: Piece) -> None:
    with pytest.raises(InvalidRequest, match="was sent twice"):
        feed(OmniPrompt(("client",)), piece, piece)
