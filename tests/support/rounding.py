"""How far the rounding of bfloat16 moves what an omni model decides by.

An incarnation that goes on from a journal computes in other shapes than one that has decided step by step: prompt and
decisions in a few forwards. Its thinker's rows differ too. Here both make the same decisions, in this process, and
so does the reference. The deviation of two rows of logits is their largest difference, as a part of the largest logit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from omni_actors.stages.autoregressive import language
from omni_actors.stages.base import Decisions
from omni_actors.stages.omni import talker
from omni_actors.stages.qwen3 import predictor
from omni_actors.stages.registry import ENGINES
from tests.support.engine_driver import Driver, run_chain
from tests.support.omni_questions import Ask
from tests.support.stage_context import stage_context

CHOOSERS = {"thinker": language, "talker": talker, "predictor": predictor}
"""The modules whose ``choose`` decides, by the part of a model."""
Logits = dict[str, list[Tensor]]
"""For each part of a model, the logits of its decisions, (vocabulary,) each; a forbidden choice has -inf."""


class OwnDecisions:
    """A thinker and a talker that make given decisions, in this process.

    engines: each stage's engine and options. model: the checkpoint. tokens: of the text. codes: of each frame.
    """

    def __init__(
        self,
        engines: Mapping[str, tuple[str, Mapping[str, Any]]],
        model: Path,
        ask: Ask,
        tokens: Sequence[int],
        codes: Sequence[Sequence[int]],
    ) -> None:
        self._ask, self._tokens, self._codes = ask, tokens, codes
        self._drivers = {}
        for name in ("thinker", "talker"):
            engine, options = engines[name]
            module, _, factory = ENGINES[engine].factory.partition(":")
            context = stage_context(options, stage=name, model=model)
            self._drivers[name] = Driver(getattr(import_module(module), factory)(context))
        self._journals: dict[str, list[Decisions]] = {"thinker": [], "talker": []}

    def close(self) -> None:
        for driver in self._drivers.values():
            driver.engine.close()

    def logits(self, cut: int = 0) -> Logits:
        """Return the logits of each decision that is made after ``cut`` outputs of each stage's journal.

        The journals are those of the first call, which is to be without a cut.
        """
        journals = {name: tuple(journal[:cut]) for name, journal in self._journals.items()}
        tokens = self._tokens[sum(map(len, journals["thinker"])) :]
        codes = self._codes[len(journals["talker"]) :]
        decided = {
            "thinker": tokens,
            "talker": [frame[0] for frame in codes],
            "predictor": [code for frame in codes for code in frame[1:]],
        }

        def arrive() -> None:
            talker_params = {"talker_temperature": 0.0, "talker_max_tokens": len(self._codes) + 1}
            self._drivers["talker"].start(
                1, ("thinker",), journal=journals["talker"], speaker=self._ask.speaker, **talker_params
            )
            self._drivers["thinker"].start(1, journal=journals["thinker"], max_tokens=len(self._tokens))
            [(data, tensors)] = self._ask.chunks
            self._drivers["thinker"].feed(1, data, tensors, last=True)

        with _deciding(decided) as found:
            outputs = run_chain(self._drivers, [arrive])
        if not cut:
            self._journals = {name: [output.decisions for output in outputs[name][1]] for name in self._drivers}
        return found


def deviations(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Return the deviation of each row from the row at the same place, counted from the end."""
    places = min(len(found), len(expected))
    pairs = zip(found[len(found) - places :], expected[len(expected) - places :], strict=True)
    return [_deviation(one[one.isfinite()], other[other.isfinite()]) for one, other in pairs]


def _deviation(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@contextmanager
def _deciding(decided: Mapping[str, Iterable[int]]) -> Iterator[Logits]:
    """Let the engines of this process decide as given, and note the logits."""
    found: Logits = {part: [] for part in CHOOSERS}
    with ExitStack() as stack:
        for part, module in CHOOSERS.items():
            stack.enter_context(mock.patch.object(module, "choose", _forced(iter(decided[part]), found[part])))
        yield found


def _forced(decided: Iterator[int], found: list[Tensor]) -> Any:
    def choose(logits: Tensor, samplers: Sequence[Any]) -> list[int]:
        [row], [sampler] = logits, samplers
        token = next(decided, None)
        if token is None:  # behind the last frame
            return [int(row.argmax())]
        found.append(row.float() if sampler is None else sampler.allowed(row.float()))
        if sampler is not None:
            sampler.accept(token)
        return [token]

    return choose
