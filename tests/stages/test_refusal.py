"""Which exceptions refuse one request, and which end the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from omni_actors.stages.base import InvalidRequest, StageFailure
from omni_actors.stages.refusal import request_work


def test_an_exception_of_a_requests_own_work_refuses_the_request(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequest) as refused, request_work("messages"):
        raise KeyError("x" * 10_000)
    assert (refused.value.param, refused.value.code) == ("messages", "unprocessable_input")
    assert refused.value.message.startswith("this input could not be processed: KeyError: 'xxx")
    assert len(refused.value.message) < 300
    printed = capfd.readouterr().err
    assert "Traceback" in printed
    assert __file__ in printed


def test_an_invalid_request_passes_unchanged(capfd: pytest.CaptureFixture[str]) -> None:
    mine = InvalidRequest("no", param="x")
    with pytest.raises(InvalidRequest) as refused, request_work("messages"):
        raise mine
    assert refused.value is mine
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_that_is_not_the_requests_fault_passes(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, request_work("messages"):
        raise error
    assert raised.value is error


def test_views_of_a_chunk_are_released_when_its_request_is_refused() -> None:
    memory = bytearray(8)

    def read() -> None:
        view = np.frombuffer(memory, np.uint8)
        raise ValueError(view.size)

    with pytest.raises(InvalidRequest), request_work():
        read()
    memory.clear()  # raises BufferError while a view exists


@pytest.mark.voice
@pytest.mark.slow
def test_a_recording_that_cannot_be_transcribed_fails_its_request_only(
    drive: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whisper = drive("whisper")
    decode = whisper.engine._model.decode

    def decode_silence(features: Any, **options: Any) -> Any:
        if features.max() > -1.0:
            raise RuntimeError("this sound is not accepted")
        return decode(features, **options)

    monkeypatch.setattr(whisper.engine._model, "decode", decode_silence)
    for request_id, level in ((1, 0.0), (2, 0.9), (3, 0.0)):
        whisper.start(request_id)
        audio = np.full(8000, level, np.float32)
        whisper.feed(request_id, {"sample_rate": 16000, "index": 0}, {"audio": audio}, last=True)
    outputs = whisper.run()
    [failure] = outputs[2]
    assert isinstance(failure, StageFailure)
    assert (failure.error.param, failure.error.code) == ("audio", "unprocessable_input")
    assert [outputs[request_id][-1].last for request_id in (1, 3)] == [True, True]


@pytest.mark.voice
@pytest.mark.parametrize("name", ["qwen3_thinker", "qwen2_5_thinker"])
def test_an_image_that_cannot_be_encoded_fails_its_request_only(
    drive: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    thinker = drive(name)
    encoders = thinker.engine._model.model
    encode = encoders.get_image_features

    def encode_some(pixels: Any, grid: Any) -> Any:
        if len(pixels) > 16:
            raise RuntimeError("this image is not accepted")
        return encode(pixels, grid)

    monkeypatch.setattr(encoders, "get_image_features", encode_some)
    words = [{"type": "image", "index": 0}, {"type": "text", "text": "what is it ?"}]
    for request_id, side in ((1, 64), (2, 256), (3, 64)):
        thinker.start(request_id, max_tokens=4)
        thinker.feed(request_id, {"index": 0}, {"image": np.zeros((side, side, 3), np.uint8)})
        thinker.feed(request_id, {"messages": [{"role": "user", "content": words}]}, last=True)
    outputs = thinker.run()
    [failure] = outputs[2]
    assert isinstance(failure, StageFailure)
    assert failure.error.code == "unprocessable_input"
    assert [outputs[request_id][-1].last for request_id in (1, 3)] == [True, True]
