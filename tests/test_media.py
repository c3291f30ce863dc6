"""From the caller's audio, images, videos and questions to pieces of input."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from omni_actors import media
from omni_actors.errors import InvalidRequest
from omni_actors.media import VideoClip
from omni_actors.outputs import AudioChunk
from omni_actors.system import OmniSystem

PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
FRAMES = np.stack([PIXELS, PIXELS + 9])
SOUND = AudioChunk(np.linspace(-1, 1, 9, dtype=np.float32), 16_000)


class Unreadable:
    """As a tensor of torch that requires grad."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("it requires grad")


def only(given: Any, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    ((found, (piece,)),) = media.pieces({kind: given}).items()
    assert found == kind
    return dict(piece.data), dict(piece.tensors)


def test_each_kind_takes_one_item_or_a_list() -> None:
    clip = VideoClip(FRAMES, 2.0)
    inputs = media.pieces({"video": [clip, b"a file"], "image": (PIXELS, PIXELS), "audio": SOUND})
    assert {kind: [piece.data["index"] for piece in pieces] for kind, pieces in inputs.items()} == {
        "audio": [0],
        "image": [0, 1],
        "video": [0, 1],
    }
    assert media.pieces({"audio": [], "image": ()}) == {}


def test_audio_becomes_contiguous_float32() -> None:
    data, tensors = only(AudioChunk(SOUND.samples.astype(np.float64)[::2], 8000), "audio")
    assert data == {"sample_rate": 8000, "index": 0}
    assert tensors["audio"].dtype == np.float32
    assert tensors["audio"].tolist() == SOUND.samples[::2].tolist()


def test_chunks_of_sound_compare_though_their_arrays_do_not() -> None:
    assert AudioChunk(SOUND.samples, 8000) not in [SOUND]
    assert SOUND in {SOUND}


def test_a_sample_rate_may_be_an_integer_of_numpy() -> None:
    data, _ = only(AudioChunk(SOUND.samples, np.int64(8000)), "audio")  # type: ignore[arg-type]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(data)) == {"sample_rate": 8000, "index": 0}
    clip, _ = only(VideoClip(FRAMES, 2.0, AudioChunk(SOUND.samples, np.int32(8000))), "video")  # type: ignore[arg-type]
    assert type(clip["sample_rate"]) is int


def test_pixels_are_not_copied() -> None:
    data, tensors = only(PIXELS, "image")
    assert data == {"index": 0}
    assert np.shares_memory(tensors["image"], PIXELS)


def test_a_pillow_image_is_measured_before_it_is_decoded() -> None:
    class Bomb:
        mode, width, height = "RGB", 30_000, 30_000

        def getexif(self) -> None: ...

        def convert(self, mode: str) -> None:
            pytest.fail("it was decoded")

    with pytest.raises(InvalidRequest, match="image 0: 30000 × 30000 pixels") as refused:
        media.pieces({"image": Bomb()})
    assert refused.value.param == "multi_modal_data"


def test_a_strided_view_becomes_contiguous() -> None:
    tensor = only(PIXELS[::-1, ::2], "image")[1]["image"]
    assert tensor.flags.c_contiguous
    assert np.array_equal(tensor, PIXELS[::-1, ::2])


def test_a_video_clip_carries_frames_rate_and_sound() -> None:
    data, tensors = only(VideoClip(FRAMES, 2, SOUND), "video")
    assert data == {"index": 0, "fps": 2.0, "sample_rate": 16_000}
    assert np.array_equal(tensors["video"], FRAMES)
    assert np.array_equal(tensors["audio"], SOUND.samples)
    assert only(VideoClip(FRAMES, 2), "video")[1].keys() == {"video"}


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("form", [bytes, bytearray, memoryview, "path"])
def test_the_bytes_of_a_file_are_not_changed(kind: str, form: Any, tmp_path: Path) -> None:
    content = b"whatever is in it"
    path = tmp_path / "file"
    path.write_bytes(content)
    _, tensors = only(path if form == "path" else form(content), kind)
    ((name, tensor),) = tensors.items()
    assert name == f"encoded_{kind}"
    assert tensor.dtype == np.uint8
    assert tensor.tobytes() == content


@pytest.mark.voice  # for Pillow
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "CMYK", "YCbCr", "I;16", "RGBA", "LA", "PA"])
def test_a_pillow_image_becomes_its_pixels(mode: str) -> None:
    from PIL import Image

    grey = np.repeat(np.array([[0, 255], [255, 0]], np.uint8)[..., None], 3, -1)
    if mode == "I;16":
        image = Image.fromarray(grey[..., 0].astype(np.uint16) * 257)
    else:
        image = (
            Image.fromarray(grey).convert("L").convert(mode) if mode == "PA" else Image.fromarray(grey).convert(mode)
        )
    assert np.array_equal(only(image, "image")[1]["image"], grey)


@pytest.mark.voice
def test_transparent_pixels_of_a_pillow_image_become_white() -> None:
    from PIL import Image

    image = Image.fromarray(np.array([[[0, 0, 0, 255], [0, 0, 0, 0], [200, 0, 0, 51]]], np.uint8))
    pixels = only(image, "image")[1]["image"]
    assert pixels.tolist() == [[[0, 0, 0], [255, 255, 255], [244, 204, 204]]]
    white = np.asarray(Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB"))
    assert np.abs(pixels.astype(int) - white).max() <= 1


@pytest.mark.voice
def test_the_transparent_value_of_a_pillow_image_of_16_bits_becomes_white() -> None:
    from PIL import Image

    image = Image.fromarray(np.array([[0x1234, 0x1235, 0]], np.uint16))
    image.info["transparency"] = 0x1234  # as Pillow has it of a PNG file
    assert only(image, "image")[1]["image"][0, :, 0].tolist() == [255, 0x12, 0]


@pytest.mark.voice
@pytest.mark.parametrize("closed", [False, True])
def test_a_pillow_image_that_cannot_be_decoded_is_refused(closed: bool) -> None:
    """Pillow reads the pixels of a file only when they are asked for: a damaged one opens."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(file, "PNG")
    image = Image.open(io.BytesIO(file.getvalue() if closed else file.getvalue()[:3000]))
    if closed:
        image.close()
    with pytest.raises(InvalidRequest, match="image 1: Pillow cannot decode it: ") as refusal:
        media.pieces({"image": [PIXELS, image]})
    assert refusal.value.param == "multi_modal_data"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"smell": b"rose"}, "unknown kind of data 'smell'; accepted: 'audio', 'image', 'video'"),
        ({"audio": b"RIFF"}, "audio 0: an AudioChunk was expected, not bytes"),
        ({"image": [PIXELS, "image.png"]}, "image 1: uint8 .* or a file was expected, not str"),
        ({"image": b""}, "image 0: the file is empty"),
        ({"image": None}, "image 0: .* not NoneType"),
        ({"image": PIXELS[..., 0]}, r"not uint8 \(4, 5\)"),
        ({"image": PIXELS[:0]}, r"not uint8 \(0, 5, 3\)"),
        ({"image": PIXELS.astype(np.float32)}, r"not float32 \(4, 5, 3\)"),
        ({"image": Path("nowhere.png")}, "image 0: .*nowhere.png"),
        ({"video": FRAMES}, "a VideoClip, a file's bytes or a Path was expected, not ndarray"),
        ({"video": VideoClip(PIXELS, 2)}, r"video 0: .*not uint8 \(4, 5, 3\)"),
        ({"video": VideoClip(FRAMES, "x")}, "video 0: fps: expected a number, found 'x'"),  # type: ignore[arg-type]
        ({"video": VideoClip(FRAMES, 2, SOUND.samples)}, "video 0: audio: an AudioChunk .* not ndarray"),  # type: ignore[arg-type]
        ({"video": VideoClip(FRAMES, 2, AudioChunk([[1.0], []], 9))}, "video 0: audio: samples: "),  # type: ignore[arg-type]
        ({"audio": AudioChunk(np.ones(4, np.int16), 9)}, "audio 0: samples: .* int16; divide 16-bit"),  # type: ignore[arg-type]
        ({"audio": AudioChunk([[1.0], []], 9)}, "audio 0: samples: float32"),  # type: ignore[arg-type]
        ({"audio": AudioChunk(Unreadable(), 9)}, "audio 0: samples: float32 .*: it requires grad"),  # type: ignore[arg-type]
        ({"image": memoryview(b"abcdef")[::2]}, "image 0: .*contiguous"),
        (np.zeros(4), "expected a mapping from kinds of data"),
    ],
)
def test_an_item_of_a_wrong_type_or_shape_is_refused(given: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        media.pieces(given)
    assert refusal.value.param == "multi_modal_data"


@pytest.mark.parametrize("prompt", [5, b"why?", ["why?"], {"role": "user"}])
def test_a_prompt_of_a_wrong_type_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompt: expected text or a list of messages") as refusal:
        media.conversation(prompt, {})
    assert refusal.value.param == "prompt"


def test_a_question_follows_the_media_that_it_is_about() -> None:
    inputs = media.pieces({"video": b"file", "image": [PIXELS, PIXELS], "audio": SOUND})
    assert media.conversation("why?", inputs) == [
        {
            "role": "user",
            "content": [
                {"type": "audio", "index": 0},
                {"type": "image", "index": 0},
                {"type": "image", "index": 1},
                {"type": "video", "index": 0},
                {"type": "text", "text": "why?"},
            ],
        }
    ]
    assert media.conversation("why?", {}) == [{"role": "user", "content": "why?"}]


GALLERY = """\
name: gallery
stages:
  eye: {engine: "tests.support.served_engines:Eye", accepts: [audio, image, messages, video], emits: text}
"""


async def test_a_pipeline_receives_media_in_order_before_the_question(tmp_path: Path) -> None:
    (tmp_path / "gallery.yaml").write_text(GALLERY)
    given = {"video": b"a video", "audio": SOUND, "image": [PIXELS, b"an image"]}
    async with OmniSystem.open(tmp_path / "gallery.yaml") as omni:
        text = "".join([output.delta async for output in omni.generate("why?", multi_modal_data=given)])
    lines = [json.loads(line) for line in text.splitlines()]
    arrived = [(*line.items(),)[0] for line in lines if "digest" in line]
    assert arrived == [("audio", 0), ("image", 0), ("encoded_image", 1), ("encoded_video", 0)]
    digests = [line["digest"] for line in lines if "digest" in line]
    sent = (SOUND.samples.tobytes(), PIXELS.tobytes(), b"an image", b"a video")
    assert digests == [hashlib.sha256(content).hexdigest() for content in sent]
    (content,) = [line["messages"][0]["content"] for line in lines if "messages" in line]
    assert [part["type"] for part in content] == ["audio", "image", "image", "video", "text"]


def test_importing_media_loads_neither_torch_nor_pillow_nor_a_decoder() -> None:
    program = "import json, sys, omni_actors.media, omni_actors.system; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert not {"torch", "PIL", "av", "transformers", "soundfile"} & set(json.loads(done.stdout))
