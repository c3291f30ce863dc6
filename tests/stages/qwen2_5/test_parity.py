"""thinker, talker and token2wav together say what transformers' own ``generate`` says: the same tokens, codes, samples.

The engines are driven as the workers' loops would: whatever one gives out is fed to the next one at once, and a stage
that has ended takes no more. Tokens are known by the rows that the talker gets of them: no two have like ones.
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
from tests.stages.qwen2_5 import reference, tiny
from tests.stages.qwen3.test_parity import STORY, SYSTEM, Ask, tensor

pytestmark = pytest.mark.voice  # the extra's libraries; the weights are random

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "wordy": {"seed": 1},
    "brief": {"seed": 2, "text_eos": 2.0, "codec_eos": 1.1},
}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "wordy": ({"prefill_chunk": 16, "max_batch": 5}, {"prefill_chunk": 7, "max_batch": 6}),
}
"""Of the thinker and the talker."""
STEPS = 2
"""Of token2wav, so that it is cheap."""


class Said(NamedTuple):
    text: str
    end: dict[str, Any]
    rows: np.ndarray[Any, Any]
    codes: np.ndarray[Any, Any]
    wave: np.ndarray[Any, Any]


class Pipeline:
    """One checkpoint's three engines, and the reference."""

    def __init__(self, directory: Path, open_engine: Callable[..., Any], options: Sequence[dict[str, Any]]) -> None:
        thinker, talker = options
        self.thinker = open_engine("qwen2_5_thinker", directory, **thinker)
        self.talker = open_engine("qwen2_5_talker", directory, **talker)
        self.token2wav = open_engine("qwen2_5_token2wav", directory, steps=STEPS)
        self.directory, self.reference = directory, reference.load(directory)
        self._processor = OmniProcessor(directory)
        self._inputs = functools.cache(self._processed)

    def _processed(self, ask: Ask) -> Any:
        prompt = OmniPrompt((CLIENT,))
        for seq, (data, tensors) in enumerate(ask.chunks):
            bundle = decode_bundle(memoryview(b"".join(encode_bundle(None, tensors))))
            prompt.feed(Chunk(CLIENT, seq, seq == len(ask.chunks) - 1, bundle.tensors, data))
        return self._processor(prompt, system_prompt="", use_audio_in_video=ask.use_audio_in_video)

    def expected(self, ask: Ask, *, padded: bool = False) -> reference.Answer:
        inputs = self._inputs(ask)
        return self.reference.answer(
            ask,
            inputs.ids,
            inputs.tensors,
            speaker=ask.speaker,
            max_tokens=ask.max_tokens,
            max_codes=ask.max_frames,
            use_audio_in_video=ask.use_audio_in_video,
            steps=STEPS,
            padded=padded,
        )

    def said(self, asks: Sequence[Ask], order: random.Random | None = None) -> list[Said]:
        """What each is answered. order: see ``run_chain``."""
        engines = {"thinker": self.thinker, "talker": self.talker, "token2wav": self.token2wav}
        stages = {name: Driver(engine) for name, engine in engines.items()}
        arrivals = [functools.partial(_arrive, stages, number, ask) for number, ask in enumerate(asks)]
        outputs = run_chain(stages, arrivals, order)
        return [self._said(*(outputs[name][number] for name in stages)) for number in range(len(asks))]

    def _said(self, thinker: list[Any], talker: list[Any], token2wav: list[Any]) -> Said:
        codes = [tensor(output.tensors["codes"])[:, 0] for output in talker if output.tensors]
        wave = [tensor(output.tensors["audio"]) for output in token2wav if output.tensors]
        return Said(
            "".join(output.data.get("text", "") for output in thinker),
            {name: value for name, value in thinker[-1].data.items() if name != "text"},
            np.concatenate([tensor(output.downstream["rows"]) for output in thinker if "rows" in output.downstream]),
            np.concatenate([np.zeros(0, np.int16), *codes]),
            np.concatenate([np.zeros(0, np.float32), *wave]),
        )

    def check(self, ask: Ask, said: Said, *, padded: bool = False) -> None:
        expected = self.expected(ask, padded=padded)
        ended = expected.ids[-1] == tiny.token("<|im_end|>")
        written = expected.ids[:-1] if ended else expected.ids
        assert said.text == tiny.TOKENIZER.decode(written, skip_special_tokens=True)
        assert said.end["finish_reason"] == ("stop" if ended else "length")
        assert said.end["completion_tokens"] == len(expected.ids)
        assert len(said.rows) == said.end["prompt_tokens"] + len(expected.ids) - 1
        if expected.crash != "thinker":
            np.testing.assert_allclose(said.rows, expected.rows, atol=1e-4)
        assert said.codes.tolist() == expected.codes.tolist()
        np.testing.assert_allclose(said.wave, expected.wave, atol=1e-4)


def _arrive(stages: Mapping[str, Driver], number: int, ask: Ask) -> None:
    stages["token2wav"].start(number, ("talker",), speaker=ask.speaker, seed=0)
    stages["talker"].start(
        number, ("thinker",), speaker=ask.speaker, talker_max_tokens=ask.max_frames, talker_temperature=0.0
    )
    stages["thinker"].start(number, max_tokens=ask.max_tokens, use_audio_in_video=ask.use_audio_in_video)
    for chunk in ask.chunks[:-1]:
        stages["thinker"].feed(number, *chunk)
    stages["thinker"].feed(number, *ask.chunks[-1], last=True)


@pytest.fixture(scope="module")
def pipeline(
    open_stage: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Pipeline]]:
    """Name of a checkpoint, and the talker's options -> its pipeline, opened once; what is alike is the same engine."""
    with ExitStack() as stack:

        @functools.cache
        def open_engine(*args: Any, **options: Any) -> Any:
            return stack.enter_context(closing(open_stage(*args, **options)))

        @functools.cache
        def saved(name: str) -> Path:
            return tiny.save(tmp_path_factory.mktemp(name), **CHECKPOINTS[name])

        @functools.cache
        def get(name: str, **talker: Any) -> Pipeline:
            options = OPTIONS.get(name, ({}, {}))
            return Pipeline(saved(name), open_engine, (options[0], options[1] | talker))

        yield get


ASKS = [
    Ask("hello", speaker="Chelsie"),
    Ask("hello", SYSTEM, speaker="Ethan"),
    Ask(STORY, max_tokens=40, max_frames=50, speaker="Chelsie"),
    Ask(STORY, SYSTEM, max_tokens=7, max_frames=9, speaker="Ethan"),
    Ask("and you ?", earlier=("who is there ?", "it is me, the assistant"), speaker="Chelsie"),
    Ask("what did you hear ?", audio=(1.7,), speaker="Ethan"),
    Ask("what is in this picture ?", image=((96, 64),), speaker="Chelsie"),
    Ask("what did you hear and see ?", SYSTEM, audio=(1.7, 0.6), image=((64, 64), (96, 128)), speaker="Ethan"),
    Ask("what happens ?", audio=(0.4,), video=4, speaker="Chelsie"),
    Ask("what do they say ?", SYSTEM, video=6, use_audio_in_video=True, speaker="Ethan"),
]
EVERYWHERE = [(name, ask) for name in ("wordy", "brief") for ask in ASKS]


@pytest.mark.parametrize(("checkpoint", "ask"), EVERYWHERE)
def test_an_answer_is_the_references(pipeline: Callable[..., Pipeline], checkpoint: str, ask: Ask) -> None:
    ours = pipeline(checkpoint)
    ours.check(ask, *ours.said([ask]))


def test_the_asks_are_of_every_kind(pipeline: Callable[..., Pipeline]) -> None:
    answers = [(ask, pipeline(checkpoint).expected(ask)) for checkpoint, ask in EVERYWHERE]
    for media in (True, False):
        these = [(a, e) for a, e in answers if bool(a.audio or a.image or a.video) is media and e.crash is None]
        cut = [len(answer.ids) == ask.max_tokens for ask, answer in these]
        assert any(cut), "the text reaches its limit"
        assert not all(cut), "or ends by itself"
        assert any(len(answer.codes) == ask.max_frames and not answer.talker_ended for ask, answer in these)
        assert any(0 < len(answer.codes) < len(answer.ids) and answer.talker_ended for _, answer in these), (
            "speech ends before the text does"
        )
        assert any(len(answer.codes) > len(answer.ids) and answer.talker_ended for _, answer in these), "or after it"
        assert len({tuple(answer.ids) for _, answer in these}) > len(these) / 2


@pytest.mark.parametrize(
    ("checkpoint", "ask", "crash"),
    [
        ("wordy", Ask("more", speaker="Ethan"), "thinker"),
        ("wordy", Ask("go", SYSTEM, speaker="Chelsie"), "talker"),
        ("brief", Ask("hi", speaker="Chelsie"), "talker"),
        ("wordy", Ask(STORY, max_tokens=1, speaker="Ethan"), "thinker"),
        ("wordy", Ask("what is it ?", image=((64, 64),), max_tokens=1, speaker="Ethan"), "thinker"),
    ],
)
def test_where_the_reference_crashes_the_text_is_right_and_there_is_no_sound(
    pipeline: Callable[..., Pipeline], checkpoint: str, ask: Ask, crash: str
) -> None:
    ours = pipeline(checkpoint)
    assert ours.expected(ask).crash == crash
    (said,) = ours.said([ask])
    ours.check(ask, said)
    assert said.wave.shape == (0,)


@pytest.mark.parametrize("ask", [ASKS[1], ASKS[4], ASKS[7], ASKS[8], ASKS[9]])
def test_prompted_as_it_was_trained_it_answers_as_the_reference_does_for_a_padded_prompt(
    pipeline: Callable[..., Pipeline], ask: Ask
) -> None:
    ours = pipeline("wordy", prompt="trained")
    (said,) = ours.said([ask])
    ours.check(ask, said, padded=True)
    assert said.codes.tolist() != ours.expected(ask).codes.tolist(), "the prompt makes a difference"


@pytest.mark.parametrize("seed", [0, 1])
def test_sixteen_at_once_are_answered_as_each_alone(pipeline: Callable[..., Pipeline], seed: int) -> None:
    """In fewer rows than there are requests, so that they join as others leave, in pieces of each other's prompts."""
    order = random.Random(seed)
    short = [ASKS[0]._replace(max_tokens=1), ASKS[5]._replace(max_tokens=5), ASKS[6]._replace(max_frames=1)]
    asks = [order.choice([*ASKS, *short]) for _ in range(16)]
    ours = pipeline("wordy")
    for ask, said in zip(asks, ours.said(asks, order if seed else None), strict=True):
        ours.check(ask, said)
