"""A thinker on vLLM reads media beside its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from omni_actors.errors import InvalidRequest
from omni_actors.stages.base import StageFailure
from tests.support.engine_cases import shown


@pytest.fixture
def driver(drive: Callable[..., Any]) -> Any:
    return drive("vllm_qwen3_thinker")


def show(driver: Any, number: int) -> None:
    driver.start(number, max_tokens=4)
    for at, (data, tensors) in enumerate(chunks := shown(number)):
        driver.feed(number, data, tensors, last=at == len(chunks) - 1)


def ask(driver: Any, number: int) -> None:
    driver.start(number, max_tokens=4)
    driver.feed(number, {"messages": [{"role": "user", "content": "what is it ?"}]}, last=True)


def test_one_whose_picture_is_still_being_read_holds_up_nobody(driver: Any) -> None:
    read, goes_on = driver.engine._media_processor, threading.Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert goes_on.wait(60)
        return read(*args, **kwargs)

    with mock.patch.object(driver.engine, "_media_processor", slow):
        show(driver, 1)
        ask(driver, 2)
        outputs: list[Any] = []
        while 2 in driver.live:
            outputs += driver.step()
        assert {output.request_id for output in outputs} == {2}
        assert driver.engine.busy, "with the one that is read"
        goes_on.set()
        assert driver.run()[1][-1].last


def test_what_cannot_be_read_is_refused_in_a_step(driver: Any) -> None:
    refusal = InvalidRequest("unsightly", param="image")
    with mock.patch.object(driver.engine, "_media_processor", side_effect=refusal):
        show(driver, 1)
        ask(driver, 2)
        ended = driver.run()
    assert ended[1] == [StageFailure(1, refusal)]
    assert ended[2][-1].last


def test_one_that_is_aborted_while_it_is_read_is_forgotten(driver: Any) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        assert goes_on.wait(60)
        raise InvalidRequest("nobody hears of it")

    with mock.patch.object(driver.engine, "_media_processor", slow):
        show(driver, 1)
        assert begun.wait(60)
        driver.abort(1)
        assert not driver.engine.busy
        goes_on.set()
        driver.engine._media_reader.submit(int).result()
        ask(driver, 2)
        assert driver.run().keys() == {2}
