"""The three engines of a tiny Qwen3-Omni, beside transformers' own ``generate``."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from omni_actors.stages.adapters.options import Adapter
from omni_actors.stages.multimodal.processor import OmniProcessor
from tests.support import qwen3_reference as reference
from tests.support.closeness import assert_same_sound
from tests.support.engine_driver import Driver, run_chain
from tests.support.omni_questions import Ask, tensor
from tiny_models import qwen3 as tiny


class Result(NamedTuple):
    """The answer of our engines."""

    text: str
    end: dict[str, Any]
    ids: list[int]
    """The tokens of the answer, without the last one."""
    codes: np.ndarray[Any, Any]
    wave: np.ndarray[Any, Any]


class Qwen3Chain:
    """The three engines of one checkpoint, and the reference."""

    def __init__(self, directory: Path, open_engine: Callable[..., Any], options: Sequence[dict[str, Any]]) -> None:
        thinker, talker = options
        self.thinker = open_engine("qwen3_thinker", directory, **thinker)
        self.talker = open_engine("qwen3_talker", directory, **talker)
        self.code2wav = open_engine("qwen3_code2wav", directory)
        self.directory, self.reference = directory, reference.load(directory)
        self._table = self.reference.model.thinker.get_input_embeddings().weight.detach().numpy()
        self._processor = OmniProcessor(directory)

    def expected(self, ask: Ask) -> reference.Answer:
        inputs = self._processor(ask.prompt, system_prompt="", use_audio_in_video=ask.use_audio_in_video)
        return self.reference.answer(
            ask,
            inputs.ids,
            inputs.tensors,
            speaker=ask.speaker,
            max_tokens=ask.max_tokens,
            max_frames=ask.max_frames,
            use_audio_in_video=ask.use_audio_in_video,
        )

    def answers(
        self, asks: Sequence[Ask], order: random.Random | None = None, loras: Sequence[Adapter | None] = ()
    ) -> list[Result]:
        """Return the answer to each question. order: see ``run_chain``. loras: the adapter of each."""
        engines = {"thinker": self.thinker, "talker": self.talker, "code2wav": self.code2wav}
        stages = {name: Driver(engine) for name, engine in engines.items()}
        pairs = zip(asks, loras or [None] * len(asks), strict=True)
        arrivals = [functools.partial(_arrive, stages, number, ask, lora) for number, (ask, lora) in enumerate(pairs)]
        outputs = run_chain(stages, arrivals, order)
        return [self._result(*(outputs[name][number] for name in stages)) for number in range(len(asks))]

    def _result(self, thinker: list[Any], talker: list[Any], code2wav: list[Any]) -> Result:
        spoken = sum(len(tensor(output.downstream["ids"])) for output in thinker if "ids" in output.downstream)
        rows = [tensor(output.downstream["rows"]) for output in thinker if "rows" in output.downstream]
        answer = np.concatenate(rows)[spoken:]
        ids = [int(np.abs(self._table - row).sum(1).argmin()) for row in answer]
        np.testing.assert_array_equal(self._table[ids].reshape(answer.shape), answer)
        codes = [np.zeros((0, self.reference.groups), np.int16)]
        codes += [tensor(output.tensors["codes"]) for output in talker if output.tensors]
        wave = [tensor(output.tensors["audio"]) for output in code2wav if output.tensors]
        return Result(
            text="".join(output.data.get("text", "") for output in thinker),
            end={name: value for name, value in thinker[-1].data.items() if name != "text"},
            ids=ids,
            codes=np.concatenate(codes),
            wave=np.concatenate([np.zeros(0, np.float32), *wave]),
        )

    def check(self, ask: Ask, result: Result) -> None:
        expected = self.expected(ask)
        ended = expected.ids[-1] == tiny.token("<|im_end|>")
        assert result.ids == expected.ids[:-1]
        assert result.text == tiny.TOKENIZER.decode(
            expected.ids[:-1] if ended else expected.ids, skip_special_tokens=True
        )
        assert result.end["finish_reason"] == ("stop" if ended else "length")
        assert result.end["completion_tokens"] == len(expected.ids)
        assert result.codes.tolist() == expected.codes.tolist()
        assert_same_sound(result.wave, self.reference.forward(expected.codes))


def _arrive(stages: Mapping[str, Driver], number: int, ask: Ask, lora: Adapter | None) -> None:
    stages["code2wav"].start(number, ("talker",))
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
