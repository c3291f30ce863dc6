"""What vLLM encodes beside a recording does not change the recording's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tests.support.closeness import assert_close
from tests.support.omni_questions import Ask, tensor

RECORDINGS = [(0.45,), (1.7,), (0.45, 0.7), (1.7, 0.6)]
"""Seconds of each request's. A chunk of Qwen3-Omni's encoder has 1 s; padding reaches what is no multiple of 0.08 s."""
ASKS = {number: Ask("what did you hear ?", audio=seconds) for number, seconds in enumerate(RECORDINGS)}


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5"])
def test_a_recordings_rows_are_those_of_its_request_alone(drive: Callable[..., Any], family: str) -> None:
    driver = drive(f"vllm_{family}_thinker")
    alone = {number: rows(driver, {number: ask})[number] for number, ask in ASKS.items()}
    together = rows(driver, ASKS)
    for number in ASKS:
        assert_close(together[number], alone[number])


def rows(driver: Any, asks: Mapping[int, Ask]) -> dict[int, np.ndarray[Any, Any]]:
    """Return the rows that each request's talker would get. All recordings are read before the first step."""
    for number, ask in asks.items():
        driver.start(number, max_tokens=2)
        for at, chunk in enumerate(ask.chunks):
            driver.feed(number, *chunk, last=at == len(ask.chunks) - 1)
    driver.engine._media_thread.submit(int).result()
    return {
        number: np.concatenate([tensor(each.downstream["rows"]) for each in outputs if "rows" in each.downstream])
        for number, outputs in driver.run().items()
    }
