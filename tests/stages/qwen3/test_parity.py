"""thinker, talker and code2wav together say what transformers' own ``generate`` says: the same tokens, codes, samples.

The engines are driven as the workers' loops would: whatever one gives out is fed to the next one at once, and a stage
that has ended takes no more. Random weights say something else for every other input, so an answer that is equal leaves
little that could be wrong before it. ``test_the_asks_are_of_every_kind`` holds the cases to what they are here for.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from omni_actors.stages.base import CLIENT, Chunk
from omni_actors.stages.multimodal.processor import OmniProcessor
from omni_actors.stages.multimodal.prompt import OmniPrompt
from ringbuf import decode_bundle, encode_bundle
from tests.stages.conftest import Driver, run_chain
from tests.stages.qwen3 import reference, tiny

pytestmark = pytest.mark.voice  # the extra's libraries; the weights are random

SYSTEM = "you are a helpful assistant ."
SAMPLE_RATE = 16_000
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "wordy": {"seed": 1},
    "brief": {"seed": 5, "text_eos": 3.0, "codec_eos": 3.0},
    "other": {
        "seed": 3,
        "hidden": 48,
        "talker_hidden": 80,
        "layers": 3,
        "talker_layers": 3,
        "experts": 4,
        "experts_per_token": 1,
        "deepstack": (1, 3),
        "groups": 6,
        "speakers": ("ada", "bob"),
    },
    "endless": {"seed": 4, "text_eos": 0.0, "codec_eos": 0.0, "groups": 2, "talker_layers": 1},
}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "wordy": ({"prefill_chunk": 16, "max_batch": 5}, {"prefill_chunk": 7, "max_batch": 6}),
    "brief": ({}, {}),
    "other": ({"prefill_chunk": 5}, {"prefill_chunk": 3}),
}
"""Of the thinker and the talker."""


class Ask(NamedTuple):
    """A request."""

    text: str
    system: str = ""
    earlier: tuple[str, ...] = ()
    """Turns before, of the user and the assistant by turns."""
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


class Said(NamedTuple):
    text: str
    end: dict[str, Any]
    ids: list[int]
    """All but the last."""
    codes: np.ndarray[Any, Any]
    wave: np.ndarray[Any, Any]


def tone(seconds: float, hertz: float) -> np.ndarray[Any, Any]:
    at = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    return (0.3 * np.sin(2 * np.pi * hertz * at)).astype(np.float32)


def noise(seed: int, height: int, width: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)


class Pipeline:
    """One checkpoint's three engines, and the reference."""

    def __init__(self, directory: Path, open_engine: Callable[..., Any], options: Sequence[dict[str, Any]]) -> None:
        thinker, talker = options
        self.thinker = open_engine("qwen3_thinker", directory, **thinker)
        self.talker = open_engine("qwen3_talker", directory, **talker)
        self.code2wav = open_engine("qwen3_code2wav", directory)
        self.directory, self.reference = directory, reference.load(directory)
        self._table = self.reference.model.thinker.get_input_embeddings().weight.detach().numpy()
        self._processor = OmniProcessor(directory)

    def expected(self, ask: Ask) -> reference.Answer:
        prompt = OmniPrompt((CLIENT,))
        for seq, (data, tensors) in enumerate(ask.chunks):
            bundle = decode_bundle(memoryview(b"".join(encode_bundle(None, tensors))))
            prompt.feed(Chunk(CLIENT, seq, seq == len(ask.chunks) - 1, bundle.tensors, data))
        inputs = self._processor(prompt, system_prompt="", use_audio_in_video=ask.use_audio_in_video)
        return self.reference.answer(
            ask,
            inputs.ids,
            inputs.tensors,
            speaker=ask.speaker,
            max_tokens=ask.max_tokens,
            max_frames=ask.max_frames,
            use_audio_in_video=ask.use_audio_in_video,
        )

    def said(self, asks: Sequence[Ask], order: random.Random | None = None) -> list[Said]:
        """What each is answered. order: see ``run_chain``."""
        engines = {"thinker": self.thinker, "talker": self.talker, "code2wav": self.code2wav}
        stages = {name: Driver(engine) for name, engine in engines.items()}
        arrivals = [functools.partial(_arrive, stages, number, ask) for number, ask in enumerate(asks)]
        outputs = run_chain(stages, arrivals, order)
        return [self._said(*(outputs[name][number] for name in stages)) for number in range(len(asks))]

    def _said(self, thinker: list[Any], talker: list[Any], code2wav: list[Any]) -> Said:
        spoken = sum(len(tensor(output.downstream["ids"])) for output in thinker if "ids" in output.downstream)
        rows = [tensor(output.downstream["rows"]) for output in thinker if "rows" in output.downstream]
        answer = np.concatenate(rows)[spoken:]
        ids = [int(np.abs(self._table - row).sum(1).argmin()) for row in answer]
        np.testing.assert_array_equal(self._table[ids].reshape(answer.shape), answer)
        codes = [np.zeros((0, self.reference.groups), np.int16)]
        codes += [tensor(output.tensors["codes"]) for output in talker if output.tensors]
        wave = [tensor(output.tensors["audio"]) for output in code2wav if output.tensors]
        return Said(
            "".join(output.data.get("text", "") for output in thinker),
            {name: value for name, value in thinker[-1].data.items() if name != "text"},
            ids,
            np.concatenate(codes),
            np.concatenate([np.zeros(0, np.float32), *wave]),
        )

    def check(self, ask: Ask, said: Said) -> None:
        expected = self.expected(ask)
        ended = expected.ids[-1] == tiny.token("<|im_end|>")
        assert said.ids == expected.ids[:-1]
        assert said.text == tiny.TOKENIZER.decode(
            expected.ids[:-1] if ended else expected.ids, skip_special_tokens=True
        )
        assert said.end["finish_reason"] == ("stop" if ended else "length")
        assert said.end["completion_tokens"] == len(expected.ids)
        assert said.codes.tolist() == expected.codes.tolist()
        np.testing.assert_allclose(said.wave, self.reference.forward(expected.codes), atol=1e-4)


def _arrive(stages: Mapping[str, Driver], number: int, ask: Ask) -> None:
    stages["code2wav"].start(number, ("talker",))
    stages["talker"].start(
        number, ("thinker",), speaker=ask.speaker, talker_max_tokens=ask.max_frames, talker_temperature=0.0
    )
    stages["thinker"].start(number, max_tokens=ask.max_tokens, use_audio_in_video=ask.use_audio_in_video)
    for chunk in ask.chunks[:-1]:
        stages["thinker"].feed(number, *chunk)
    stages["thinker"].feed(number, *ask.chunks[-1], last=True)


def tensor(one: Any) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = one if isinstance(one, np.ndarray) else one.numpy()
    return array


@pytest.fixture(scope="module")
def pipeline(
    open_stage: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Pipeline]]:
    """Name of a checkpoint -> its pipeline, opened once."""
    with ExitStack() as stack:

        def open_engine(*args: Any, **options: Any) -> Any:
            return stack.enter_context(closing(open_stage(*args, **options)))

        @functools.cache
        def get(name: str) -> Pipeline:
            directory = tiny.save(tmp_path_factory.mktemp(name), **CHECKPOINTS[name])
            return Pipeline(directory, open_engine, OPTIONS.get(name, ({}, {})))

        yield get


STORY = "please tell me a short story about the sea ."
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
EVERYWHERE = [(name, ask) for name in ("wordy", "brief") for ask in ASKS] + [
    ("other", ask._replace(speaker="bob" if number % 2 else "ada"))
    for number, ask in enumerate([ASKS[1], ASKS[3], ASKS[5], ASKS[7], ASKS[9]])
]


@pytest.mark.parametrize(("checkpoint", "ask"), EVERYWHERE)
def test_an_answer_is_the_references(pipeline: Callable[[str], Pipeline], checkpoint: str, ask: Ask) -> None:
    ours = pipeline(checkpoint)
    ours.check(ask, *ours.said([ask]))


def test_the_asks_are_of_every_kind(pipeline: Callable[[str], Pipeline]) -> None:
    answers = [(ask, pipeline(checkpoint).expected(ask)) for checkpoint, ask in EVERYWHERE]
    for media in (True, False):
        these = [(a, e) for a, e in answers if bool(a.audio or a.image or a.video) is media and e.crash is None]
        cut = [len(answer.ids) == ask.max_tokens for ask, answer in these]
        assert any(cut), "the text reaches its limit"
        assert not all(cut), "or ends by itself"
        assert any(len(answer.codes) == ask.max_frames - 1 and not answer.talker_ended for ask, answer in these)
        assert any(0 < len(answer.codes) < len(answer.ids) and answer.talker_ended for _, answer in these), (
            "speech ends before the text does"
        )
        assert any(len(answer.codes) > len(answer.ids) and answer.talker_ended for _, answer in these), "or after it"
        assert len({tuple(answer.ids) for _, answer in these}) > len(these) / 2


@pytest.mark.parametrize(
    ("checkpoint", "ask", "crash"),
    [
        ("brief", Ask("hello how are you today ?", SYSTEM), "thinker"),
        ("brief", Ask("tell me"), "thinker"),
        ("brief", Ask("more"), "talker"),
        ("brief", Ask("zip", SYSTEM, speaker="chelsie"), "talker"),
        ("wordy", Ask(STORY, max_tokens=1), "thinker"),
        ("wordy", Ask(STORY, max_frames=1), "talker"),
        ("wordy", Ask("what is it ?", image=((64, 64),), max_tokens=1), "thinker"),
    ],
)
def test_where_the_reference_crashes_the_text_is_right_and_there_is_no_sound(
    pipeline: Callable[[str], Pipeline], checkpoint: str, ask: Ask, crash: str
) -> None:
    ours = pipeline(checkpoint)
    assert ours.expected(ask).crash == crash
    (said,) = ours.said([ask])
    ours.check(ask, said)
    assert said.wave.shape == (0,)


def sixteen(order: random.Random) -> list[Ask]:
    """Few of them differ: what the reference says to each is computed once."""
    short = [ASKS[0]._replace(max_tokens=1), ASKS[5]._replace(max_tokens=5), ASKS[6]._replace(max_frames=1)]
    others = [ASKS[0]._replace(speaker="chelsie"), ASKS[4]._replace(speaker="aiden")]
    return [order.choice([*ASKS, *short, *others]) for _ in range(16)]


@pytest.mark.parametrize("seed", [0, 1])
def test_sixteen_at_once_are_answered_as_each_alone(pipeline: Callable[[str], Pipeline], seed: int) -> None:
    """In fewer rows than there are requests, so that they join as others leave, in pieces of each other's prompts."""
    order = random.Random(seed)
    asks, ours = sixteen(order), pipeline("wordy")
    for ask, said in zip(asks, ours.said(asks, order if seed else None), strict=True):
        ours.check(ask, said)


def test_a_long_answer_sounds_as_the_reference_decodes_it_bit_for_bit(
    pipeline: Callable[[str], Pipeline], open_stage: Callable[..., Any]
) -> None:
    """By more than one of its chunks of 300 frames; streamed, it is what ``check`` compares."""
    ours, ask = pipeline("endless"), Ask(STORY, max_tokens=5, max_frames=312)
    (said,) = ours.said([ask])
    ours.check(ask, said)
    expected = ours.expected(ask)
    assert len(expected.codes) == 311
    assert np.abs(expected.wave).max() > 0.05
    with closing(open_stage("qwen3_code2wav", ours.directory, decode="reference")) as engine:
        driver = Driver(engine)
        driver.start(1, ("talker",))
        for frame in said.codes:
            driver.feed(1, {}, {"codes": frame[None]}, source="talker")
        driver.feed(1, last=True, source="talker")
        sound = [output.tensors["audio"] for output in driver.run()[1] if output.tensors]
    assert np.array_equal(np.concatenate(sound), expected.wave)
