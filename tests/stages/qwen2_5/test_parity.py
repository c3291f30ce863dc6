"""thinker, talker and token2wav together say what transformers' own ``generate`` says: the same tokens, codes, samples.

The engines are driven as the workers' loops would: whatever one gives out is fed to the next one at once, and a stage
that has ended takes no more. Tokens are known by the rows that the talker gets of them: no two have like ones.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from omni_actors.stages.base import CLIENT, Chunk
from omni_actors.stages.multimodal.processor import OmniProcessor
from omni_actors.stages.multimodal.prompt import OmniPrompt
from ringbuf import decode_bundle, encode_bundle
from tests.stages.conftest import Driver, for_stages
from tests.stages.qwen2_5 import reference, tiny
from tests.stages.qwen3.test_parity import ASKS as QWEN3_ASKS
from tests.stages.qwen3.test_parity import STORY, SYSTEM, Ask, tensor

pytestmark = pytest.mark.voice  # the extra's libraries; the weights are random

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "wordy": {"seed": 1},
    "brief": {"seed": 2, "text_eos": 2.0, "codec_eos": 1.3},
    "curt": {"seed": 0, "text_eos": 3.0, "codec_eos": 3.0},
}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "wordy": ({"prefill_chunk": 16, "max_batch": 5}, {"prefill_chunk": 7, "max_batch": 6}),
}
"""Of the thinker and the talker."""
STEPS = 2
"""Of token2wav, so that it is cheap."""
SPEAKERS = tuple(tiny.SPEAKERS)


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

    def expected(self, ask: Ask, **how: Any) -> reference.Answer:
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
            max_codes=ask.max_frames,
            use_audio_in_video=ask.use_audio_in_video,
            steps=STEPS,
            **how,
        )

    def said(self, asks: Sequence[Ask], order: random.Random | None = None) -> list[Said]:
        """What each is answered. order: of arrivals and steps; without it, each stage steps in turn."""
        drivers = thinker, talker, token2wav = [Driver(engine) for engine in (self.thinker, self.talker, self.token2wav)]
        below = {id(thinker): ("thinker", talker), id(talker): ("talker", token2wav)}
        outputs: dict[tuple[int, int], list[Any]] = {}
        coming = list(enumerate(asks))
        try:
            while coming or any(driver.engine.busy for driver in drivers):
                if coming and (order is None or order.random() < 0.2 or not thinker.engine.busy):
                    self._start(*coming.pop(0), *drivers)
                working = [driver for driver in drivers if driver.engine.busy]
                for driver in working if order is None else [order.choice(working)]:
                    for output in driver.step():
                        outputs.setdefault((id(driver), output.request_id), []).append(output)
                        source, next_driver = below.get(id(driver), ("", None))
                        if next_driver and output.request_id in next_driver.live:
                            tensors = for_stages(output)
                            next_driver.feed(output.request_id, output.data, tensors, last=output.last, source=source)
            assert not thinker.live | talker.live | token2wav.live
        finally:
            for driver in drivers:
                for number in list(driver.live):
                    driver.abort(number)
        return [self._said(*(outputs[id(driver), number] for driver in drivers)) for number in range(len(asks))]

    @staticmethod
    def _start(number: int, ask: Ask, thinker: Driver, talker: Driver, token2wav: Driver) -> None:
        token2wav.start(number, ("talker",), speaker=ask.speaker, seed=0)
        talker.start(
            number, ("thinker",), speaker=ask.speaker, talker_max_tokens=ask.max_frames, talker_temperature=0.0
        )
        thinker.start(number, max_tokens=ask.max_tokens, use_audio_in_video=ask.use_audio_in_video)
        for data, tensors in ask.chunks[:-1]:
            thinker.feed(number, data, tensors)
        thinker.feed(number, *ask.chunks[-1], last=True)

    def _said(self, thinker: list[Any], talker: list[Any], token2wav: list[Any]) -> Said:
        codes = [tensor(output.tensors["codes"])[:, 0] for output in talker if output.tensors]
        wave = [tensor(output.tensors["audio"]) for output in token2wav if output.tensors]
        return Said(
            "".join(output.data.get("text", "") for output in thinker),
            {name: value for name, value in thinker[-1].data.items() if name != "text"},
            np.concatenate([tensor(output.onward["rows"]) for output in thinker if "rows" in output.onward]),
            np.concatenate([np.zeros(0, np.int16), *codes]),
            np.concatenate([np.zeros(0, np.float32), *wave]),
        )

    def check(self, ask: Ask, said: Said, **how: Any) -> None:
        expected = self.expected(ask, **how)
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


@pytest.fixture(scope="module")
def pipeline(
    open_stage: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Pipeline]]:
    """Name of a checkpoint, and the talker's options -> its pipeline, opened once."""
    with ExitStack() as stack:

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


ASKS = [ask._replace(speaker=SPEAKERS[number % 2]) for number, ask in enumerate(QWEN3_ASKS)]
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
