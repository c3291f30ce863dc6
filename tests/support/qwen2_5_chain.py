"""The three engines of a tiny Qwen2.5-Omni, beside transformers' own ``generate``."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from omni_actors.stages.adapters.options import Adapter
from omni_actors.stages.multimodal.processor import OmniProcessor
from tests.support import qwen2_5_reference as reference
from tests.support.closeness import assert_close, assert_same_sound
from tests.support.engine_driver import Driver, run_chain
from tests.support.omni_questions import Ask, tensor
from tiny_models import qwen2_5 as tiny

STEPS = 2
"""Steps of token2wav's solver: few, so that it is cheap."""


class Result(NamedTuple):
    """The answer of our engines."""

    text: str
    end: dict[str, Any]
    rows: np.ndarray[Any, Any]
    codes: np.ndarray[Any, Any]
    wave: np.ndarray[Any, Any]


class Qwen25Chain:
    """The three engines of one checkpoint, and the reference."""

    def __init__(self, directory: Path, open_engine: Callable[..., Any], options: Sequence[dict[str, Any]]) -> None:
        thinker, talker = options
        self.thinker = open_engine("qwen2_5_thinker", directory, **thinker)
        self.talker = open_engine("qwen2_5_talker", directory, **talker)
        self.token2wav = open_engine("qwen2_5_token2wav", directory, steps=STEPS)
        self.directory, self.reference = directory, reference.load(directory)
        self._processor = OmniProcessor(directory)
        self._inputs = functools.cache(self._processed)

    def _processed(self, ask: Ask) -> Any:
        return self._processor(ask.prompt, system_prompt="", use_audio_in_video=ask.use_audio_in_video)

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

    def answers(
        self, asks: Sequence[Ask], order: random.Random | None = None, loras: Sequence[Adapter | None] = ()
    ) -> list[Result]:
        """Return the answer to each question. order: see ``run_chain``. loras: the adapter of each."""
        engines = {"thinker": self.thinker, "talker": self.talker, "token2wav": self.token2wav}
        stages = {name: Driver(engine) for name, engine in engines.items()}
        pairs = zip(asks, loras or [None] * len(asks), strict=True)
        arrivals = [functools.partial(_arrive, stages, number, ask, lora) for number, (ask, lora) in enumerate(pairs)]
        outputs = run_chain(stages, arrivals, order)
        return [self._result(*(outputs[name][number] for name in stages)) for number in range(len(asks))]

    def _result(self, thinker: list[Any], talker: list[Any], token2wav: list[Any]) -> Result:
        codes = [tensor(output.tensors["codes"])[:, 0] for output in talker if output.tensors]
        wave = [tensor(output.tensors["audio"]) for output in token2wav if output.tensors]
        return Result(
            text="".join(output.data.get("text", "") for output in thinker),
            end={name: value for name, value in thinker[-1].data.items() if name != "text"},
            rows=np.concatenate(
                [tensor(output.downstream["rows"]) for output in thinker if "rows" in output.downstream]
            ),
            codes=np.concatenate([np.zeros(0, np.int16), *codes]),
            wave=np.concatenate([np.zeros(0, np.float32), *wave]),
        )

    def check(self, ask: Ask, result: Result, *, padded: bool = False) -> None:
        expected = self.expected(ask, padded=padded)
        ended = expected.ids[-1] == tiny.token("<|im_end|>")
        written = expected.ids[:-1] if ended else expected.ids
        assert result.text == tiny.TOKENIZER.decode(written, skip_special_tokens=True)
        assert result.end["finish_reason"] == ("stop" if ended else "length")
        assert result.end["completion_tokens"] == len(expected.ids)
        assert len(result.rows) == result.end["prompt_tokens"] + len(expected.ids) - 1
        if expected.crash != "thinker":
            assert_close(result.rows, expected.rows)
        assert result.codes.tolist() == expected.codes.tolist()
        assert_same_sound(result.wave, expected.wave)


def _arrive(stages: Mapping[str, Driver], number: int, ask: Ask, lora: Adapter | None) -> None:
    stages["token2wav"].start(number, ("talker",), speaker=ask.speaker, seed=0)
    stages["talker"].start(
        number,
        ("thinker",),
        speaker=ask.speaker,
        talker_max_tokens=ask.max_frames,
        talker_temperature=0.0,
        lora=lora,
    )
    stages["thinker"].start(number, max_tokens=ask.max_tokens, use_audio_in_video=ask.use_audio_in_video, lora=lora)
    for chunk in ask.chunks[:-1]:
        stages["thinker"].feed(number, *chunk)
    stages["thinker"].feed(number, *ask.chunks[-1], last=True)
