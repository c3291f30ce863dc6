"""A thinker on vLLM reads media while its steps go on."""

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


def test_a_request_whose_image_is_still_being_read_delays_no_other(driver: Any) -> None:
    read, may_end = driver.engine._media_processor, threading.Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert may_end.wait(60)
        return read(*args, **kwargs)

    with mock.patch.object(driver.engine, "_media_processor", slow):
        show(driver, 1)
        ask(driver, 2)
        outputs: list[Any] = []
        while 2 in driver.live:
            outputs += driver.step()
        assert {output.request_id for output in outputs} == {2}
        assert driver.engine.busy, "request 1 is still being read"
        may_end.set()
        assert driver.run()[1][-1].last


def test_an_unreadable_image_fails_its_request_in_a_step(driver: Any) -> None:
    refusal = InvalidRequest("unsightly", param="image")
    with mock.patch.object(driver.engine, "_media_processor", side_effect=refusal):
        show(driver, 1)
        ask(driver, 2)
        ended = driver.run()
    assert ended[1] == [StageFailure(1, refusal)]
    assert ended[2][-1].last


def test_a_request_that_is_aborted_while_its_media_are_read_is_forgotten(driver: Any) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        assert may_end.wait(60)
        raise InvalidRequest("dropped")

    with mock.patch.object(driver.engine, "_media_processor", slow):
        show(driver, 1)
        assert begun.wait(60)
        driver.abort(1)
        assert not driver.engine.busy
        may_end.set()
        driver.engine._media_thread.submit(int).result()
        ask(driver, 2)
        assert driver.run().keys() == {2}


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen2_5"])
def test_tokens_that_vllm_gives_out_together_are_all_in_the_answer(
    drive: Callable[..., Any], family: str, stop: bool
) -> None:
    driver, params = drive(f"vllm_{family}_thinker"), dict[str, Any]()

    def answer(number: int, **more: Any) -> tuple[str, int, int, int]:
        driver.start(number, max_tokens=12, **params, **more)
        driver.feed(number, {"messages": [{"role": "user", "content": "what is it ?"}]}, last=True)
        outputs = driver.run()[number]
        rows = sum(len(output.downstream["rows"].numpy()) for output in outputs if "rows" in output.downstream)
        text = "".join(output.data.get("text", "") for output in outputs)
        return text, rows, outputs[-1].data["completion_tokens"], len(outputs)

    if stop:
        params["stop"] = [answer(3)[0].strip()[-8:-5]]
    (*one_by_one, several), (*together, few) = answer(1), answer(2, stream_interval=5)
    assert together == one_by_one
    assert few < several
