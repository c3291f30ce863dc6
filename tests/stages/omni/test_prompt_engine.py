"""The input side that all thinkers share, without a model: a batch that answers each prompt with its own words."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from omni_actors.stages.autoregressive.prompt_engine import PromptEngine
from omni_actors.stages.base import InvalidRequest, StageFailure, StageOutput, StageRequest
from omni_actors.stages.multimodal.processor import OmniInputs
from omni_actors.stages.multimodal.prompt import OmniPrompt
from omni_actors.stages.omni.media_thread import MediaThread
from omni_actors.stages.omni.options import ThinkerParams
from omni_actors.stages.omni.prompt_engine import OmniPromptEngine, OmniRequest
from omni_actors.stages.refusal import validated
from tests.support.engine_driver import Driver

PIXELS = np.zeros((4, 4, 3), np.uint8)


class Batch(PromptEngine[OmniRequest]):
    """Answers each admitted request in the next step, with the prompt that it was admitted with."""

    def __init__(self) -> None:
        super().__init__()
        self.admitted: dict[int, Any] = {}

    @property
    def busy(self) -> bool:
        return bool(self.admitted)

    def _join_batch(self, request: OmniRequest, prompt: Any) -> None:
        if prompt == "too long":
            raise InvalidRequest("the prompt is too long", param="messages")
        self.admitted[request.id] = prompt

    def abort(self, request_id: int) -> None:
        super().abort(request_id)
        self.admitted.pop(request_id, None)

    def step(self) -> Iterator[StageOutput | StageFailure]:
        while self.admitted:
            request_id, prompt = self.admitted.popitem()
            del self._requests[request_id]
            yield StageOutput(request_id, data={"text": prompt}, last=True)


class Engine(OmniPromptEngine[OmniRequest], Batch):
    """Its processor waits for ``may_read`` if the prompt has media."""

    def __init__(self) -> None:
        super().__init__()
        self.may_read, self.reading = threading.Event(), threading.Event()
        self._media_thread, self._system_prompt = MediaThread(), ""
        self._config = SimpleNamespace(
            thinker_config=SimpleNamespace(audio_token_id=97, image_token_id=98, video_token_id=99)
        )
        self._processor, self._media_processor = self.process, self.process_media  # type: ignore[assignment]

    def process(self, prompt: OmniPrompt, **options: Any) -> OmniInputs:
        text = " ".join(text for message in prompt.messages for text in message.texts)
        if text == "unreadable":
            raise ValueError(text)
        return OmniInputs([1, 98], {"text": text}, False)  # type: ignore[dict-item]

    def process_media(self, prompt: OmniPrompt, **options: Any) -> OmniInputs:
        self.reading.set()
        assert self.may_read.wait(60)
        return self.process(prompt, **options)

    def _new_request(self, request: StageRequest) -> OmniRequest:
        return OmniRequest(request, validated(request.params, ThinkerParams), OmniPrompt(request.sources))

    def _prepare(self, request: OmniRequest, inputs: OmniInputs) -> Any:
        return inputs.tensors["text"]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with closing(Engine()) as engine:
        yield engine
        engine.may_read.set()


@pytest.fixture
def driver(engine: Engine) -> Driver:
    return Driver(engine)


def ask(driver: Driver, number: int, text: str, *, image: bool = False) -> None:
    driver.start(number)
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if image:
        driver.feed(number, {"index": 0}, {"image": PIXELS})
        parts.append({"type": "image", "index": 0})
    driver.feed(number, {"messages": [{"role": "user", "content": parts}]}, last=True)


def test_a_text_prompt_does_not_wait_for_the_media_of_another_request(engine: Engine, driver: Driver) -> None:
    ask(driver, 1, "a picture", image=True)
    ask(driver, 2, "words")
    assert [(output.request_id, output.data["text"]) for output in driver.step()] == [(2, "words")]
    assert engine.busy, "request 1 is still being read"
    assert driver.step() == []
    engine.may_read.set()
    assert [output.data["text"] for output in driver.run()[1]] == ["a picture"]
    assert not engine.busy


@pytest.mark.parametrize(("text", "code"), [("unreadable", "unprocessable_input"), ("too long", "invalid_value")])
def test_a_prompt_that_fails_ends_its_own_request_in_feed_or_in_a_step(
    engine: Engine, driver: Driver, text: str, code: str
) -> None:
    engine.may_read.set()
    with pytest.raises(InvalidRequest) as refused:
        ask(driver, 1, text)
    assert refused.value.code == code
    driver.live.discard(1)
    ask(driver, 2, text, image=True)
    ask(driver, 3, "words")
    outputs = driver.run()
    [failure] = outputs[2]
    assert isinstance(failure, StageFailure)
    assert failure.error.code == code
    assert outputs[3][-1].last
    assert not engine._requests


def test_a_request_that_is_aborted_while_its_media_are_read_never_enters_the_batch(
    engine: Engine, driver: Driver
) -> None:
    ask(driver, 1, "a picture", image=True)
    assert engine.reading.wait(60)
    driver.abort(1)
    assert not engine.busy
    engine.may_read.set()
    engine._media_thread.submit(int).result()  # the thread has finished the dropped work
    ask(driver, 2, "words")
    assert driver.run().keys() == {2}


@pytest.mark.parametrize("downstream", [True, False])
def test_a_request_has_a_handoff_if_a_downstream_stage_takes_part(engine: Engine, downstream: bool) -> None:
    request = engine._new_request(StageRequest(1, ("client",), {}, downstream))
    engine._read(request, engine.process)  # type: ignore[arg-type]
    assert (request.handoff is not None) == downstream
    assert request.is_media.tolist() == [False, True]
