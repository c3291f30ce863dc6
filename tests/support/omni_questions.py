"""Questions for the tiny omni models, with media of every kind."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np

from omni_actors.stages.base import CLIENT, Chunk
from omni_actors.stages.multimodal.prompt import OmniPrompt
from ringbuf import decode_bundle, encode_bundle

SYSTEM = "you are a helpful assistant ."
SAMPLE_RATE = 16_000
STORY = "please tell me a short story about the sea ."


class Ask(NamedTuple):
    """A request."""

    text: str
    system: str = ""
    earlier: tuple[str, ...] = ()
    """Earlier turns, alternately of the user and of the assistant."""
    audio: tuple[float, ...] = ()
    """Seconds of tones."""
    image: tuple[tuple[int, int], ...] = ()
    """Heights and widths."""
    video: int = 0
    """Frames, 2 a second."""
    use_audio_in_video: bool = False
    speaker: str = "ethan"
    max_tokens: int = 16
    max_frames: int = 20

    @property
    def messages(self) -> list[dict[str, Any]]:
        kinds = {"audio": len(self.audio), "image": len(self.image), "video": bool(self.video)}
        parts = [{"type": kind, "index": index} for kind, count in kinds.items() for index in range(count)]
        question = {"role": "user", "content": [*parts, {"type": "text", "text": self.text}]}
        roles = ["user", "assistant"] * len(self.earlier)
        turns = [{"role": role, "content": text} for role, text in zip(roles, self.earlier, strict=False)]
        return [*([{"role": "system", "content": self.system}] if self.system else []), *turns, question]

    @property
    def chunks(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """data and tensors, in the order in which a client's chunks come."""
        made: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"sample_rate": SAMPLE_RATE, "index": index}, {"audio": tone(seconds, 220 * (index + 1))})
            for index, seconds in enumerate(self.audio)
        ]
        made += [({"index": index}, {"image": noise(index, *size)}) for index, size in enumerate(self.image)]
        made.append(({"messages": self.messages}, {}))
        if self.video:
            frames = np.stack([noise(number, 64, 96) for number in range(self.video)])
            sound = {"audio": tone(self.video / 2, 330)} if self.use_audio_in_video else {}
            rate = {"sample_rate": SAMPLE_RATE} if sound else {}
            made.append(({"index": 0, "fps": 2.0, **rate}, {"video": frames, **sound}))
        return made

    @property
    def prompt(self) -> OmniPrompt:
        """What a thinker collects of the chunks."""
        prompt = OmniPrompt((CLIENT,))
        for seq, (data, tensors) in enumerate(self.chunks):
            bundle = decode_bundle(memoryview(b"".join(encode_bundle(None, tensors))))
            last = seq == len(self.chunks) - 1
            prompt.feed(Chunk(source=CLIENT, seq=seq, last=last, tensors=bundle.tensors, data=data))
        return prompt


def tone(seconds: float, hertz: float) -> np.ndarray[Any, Any]:
    at = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    return (0.3 * np.sin(2 * np.pi * hertz * at)).astype(np.float32)


def noise(seed: int, height: int, width: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)


def tensor(one: Any) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = one if isinstance(one, np.ndarray) else one.numpy()
    return array


ASKS = [
    Ask("hello you"),
    Ask("sing", SYSTEM, speaker="chelsie"),
    Ask(STORY, max_tokens=24, max_frames=30),
    Ask(STORY, SYSTEM, speaker="Aiden", max_tokens=7, max_frames=9),
    Ask("and now ?", earlier=("who is there ?", "it is me, the assistant")),
    Ask("what did you hear ?", audio=(1.7,)),
    Ask("what is in this picture ?", image=((96, 64),), speaker="chelsie"),
    Ask("what did you hear and see ?", SYSTEM, audio=(1.7, 0.6), image=((64, 64), (96, 128)), speaker="aiden"),
    Ask("what happens ?", audio=(0.4,), video=4),
    Ask("what do they say ?", SYSTEM, video=6, use_audio_in_video=True),
]


def sixteen(order: random.Random) -> list[Ask]:
    """Few of them differ, so the reference answers each once."""
    short = [ASKS[0]._replace(max_tokens=1), ASKS[5]._replace(max_tokens=5), ASKS[6]._replace(max_frames=1)]
    others = [ASKS[0]._replace(speaker="chelsie"), ASKS[4]._replace(speaker="aiden")]
    return [order.choice([*ASKS, *short, *others]) for _ in range(16)]
