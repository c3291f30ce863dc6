"""What the tests know of one engine: how to use it, and how to compare what it puts out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from omni_actors.stages.base import CLIENT
from tests.support.closeness import assert_same_results

FeedArgs = tuple[dict[str, Any], dict[str, Any]]
"""data and tensors of a chunk."""


class Case:
    """How to use one engine.

    inputs: two requests, of two chunks at least. refused: a chunk that no request may bring.
    role: the option of an engine that may prefill and decode in two stages; "": the engine has its default options.
    normalise: checks outputs, and joins them into a value that does not depend on how they were cut into chunks.
    """

    def __init__(
        self,
        name: str,
        inputs: list[list[FeedArgs]],
        refused: FeedArgs,
        normalise: Callable[[list[Any]], Any],
        source: str = CLIENT,
        role: str = "",
        **params: Any,
    ) -> None:
        self.opened = f"{name}@{role}" if role else name
        """What the fixtures ``shared_engines`` and ``open_stage`` open it by."""
        self.name, self.inputs, self.refused, self.normalise = name, inputs, refused, normalise
        self.source, self.params = source, params
        self._expected: dict[int, list[Any]] = {}

    def start(self, driver: Any, request_id: int, **resumption: Any) -> None:
        """resumption: ``journal`` and ``needed_from``."""
        driver.start(request_id, (self.source,), **resumption, **self.params)

    def feed(self, driver: Any, request_id: int, which: int, part: slice = slice(None)) -> None:
        chunks = self.inputs[which]
        for i in range(len(chunks))[part]:
            driver.feed(request_id, *chunks[i], last=i == len(chunks) - 1, source=self.source)

    def alone(self, driver: Any, request_id: int, which: int) -> list[Any]:
        """The outputs of input number ``which`` by itself."""
        self.start(driver, request_id)
        self.feed(driver, request_id, which)
        outputs: list[Any] = driver.run()[request_id]
        return outputs

    def outputs(self, driver: Any, which: int) -> list[Any]:
        """As ``alone``, computed once."""
        if which not in self._expected:
            self._expected[which] = self.alone(driver, 1000 + which, which)
        return self._expected[which]

    def check(self, driver: Any, outputs: list[Any], which: int) -> None:
        """They are what input number ``which`` gives by itself."""
        assert_same_results(self.normalise(outputs), self.normalise(self.outputs(driver, which)))


def shown(seed: int) -> list[FeedArgs]:
    """A picture and a question about it."""
    image = np.random.default_rng(seed).integers(0, 255, (64, 64, 3), np.uint8)
    words = [{"type": "image", "index": 0}, {"type": "text", "text": "what is it ?"}]
    return [({"index": 0}, {"image": image}), ({"messages": [{"role": "user", "content": words}]}, {})]
