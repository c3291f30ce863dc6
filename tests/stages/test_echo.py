from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from omni_actors.stages.base import InvalidRequest, StageFailure
from omni_actors.stages.echo.engine import EchoEngine, payload
from ringbuf import Tensor


@pytest.fixture
def echo(open_stage: Callable[..., Any], drive: Callable[..., Any]) -> Callable[..., Any]:
    """echo(**options): a driver of an echo engine."""
    return lambda **options: drive(open_stage("echo", **options))


def test_each_chunk_gives_fan_out_outputs_with_its_data_and_tensors(echo: Callable[..., Any]) -> None:
    driver = echo(fan_out=3)
    driver.start(1)
    for n in range(2):
        driver.feed(1, {"n": n}, {"x": np.arange(n, dtype=np.int16)}, last=n == 1)
    outputs = driver.run()[1]
    assert [output.data["n"] for output in outputs] == [0, 0, 0, 1, 1, 1]
    assert [output.tensors["x"].shape for output in outputs] == [(0,)] * 3 + [(1,)] * 3
    assert [output.last for output in outputs] == [False] * 5 + [True]


def test_a_dtype_that_numpy_lacks_passes_through(echo: Callable[..., Any]) -> None:
    driver = echo()
    driver.start(1)
    driver.feed(1, tensors={"x": Tensor("bfloat16", (2, 2), bytes(range(8)))}, last=True)
    [output] = driver.run()[1]
    x = output.tensors["x"]
    assert (x.dtype, x.shape, bytes(x.data)) == ("bfloat16", (2, 2), bytes(range(8)))


def test_the_payload_is_a_function_of_the_request_and_the_number_of_the_output(echo: Callable[..., Any]) -> None:
    driver = echo(payload_bytes=1000, fan_out=2)
    driver.start(7)
    driver.feed(7)
    driver.feed(7, last=True)
    for seq, output in enumerate(driver.run()[7]):
        np.testing.assert_array_equal(output.tensors["payload"], payload(7, seq, 1000))
    distinct = {payload(request, seq, 1000).tobytes() for request in range(20) for seq in range(20)}
    assert len(distinct) == 400


def test_one_step_gives_one_output_of_every_ready_request(echo: Callable[..., Any]) -> None:
    driver = echo(fan_out=2)
    for request_id in (1, 2, 3):
        driver.start(request_id)
    driver.feed(1, last=True)
    driver.feed(3)
    assert [output.request_id for output in driver.step()] == [1, 3]
    driver.feed(2, last=True)
    assert [output.request_id for output in driver.step()] == [1, 2, 3]
    assert [output.request_id for output in driver.step()] == [2]
    driver.abort(3)


def test_the_last_output_comes_when_every_source_has_ended(echo: Callable[..., Any]) -> None:
    driver = echo()
    driver.start(1, ("a", "b"))
    driver.feed(1, {"n": 0}, last=True, source="a")
    assert [output.last for output in driver.run()[1]] == [False]
    driver.feed(1, {"n": 1}, source="b")
    driver.feed(1, {"n": 2}, last=True, source="b")
    assert [(output.data["n"], output.last) for output in driver.run()[1]] == [(1, False), (2, True)]


def test_a_request_without_sources_gives_an_empty_last_output(echo: Callable[..., Any]) -> None:
    driver = echo()
    driver.start(1, ())
    [output] = driver.run()[1]
    assert (output.last, output.tensors, output.data) == (True, {}, {})


def test_loading_and_steps_take_the_configured_time(echo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    driver = echo(load_s=3.0, step_s=2.0)
    for request_id in (1, 2):
        driver.start(request_id)
        driver.feed(request_id, last=True)
    driver.run()
    assert slept == [3.0, 2.0]


def test_a_spinning_step_uses_the_cpu_instead_of_sleeping(
    echo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = echo(step_s=0.02, spin=True)
    driver.start(1)
    driver.feed(1, last=True)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"slept {seconds} s"))
    began = time.perf_counter()
    driver.run()
    assert time.perf_counter() - began >= 0.02


def test_a_chunk_can_crash_feed_or_step(echo: Callable[..., Any]) -> None:
    driver = echo()
    driver.start(1)
    with pytest.raises(RuntimeError, match="crash in feed"):
        driver.feed(1, {"echo": {"raise": "feed"}})
    driver.feed(1, {"echo": {"raise": "step"}})
    with pytest.raises(RuntimeError, match="crash in step"):
        driver.step()
    driver.abort(1)


def test_a_chunk_can_fail_its_request_in_step(echo: Callable[..., Any]) -> None:
    driver = echo(fan_out=2)
    for request_id in (1, 2):
        driver.start(request_id)
    driver.feed(1, {"n": 0})
    driver.feed(1, {"echo": {"invalid": "step"}}, last=True)
    driver.feed(2, last=True)
    outputs = driver.run()
    assert [output.data for output in outputs[1][:-1]] == [{"n": 0}] * 2
    assert isinstance(outputs[1][-1], StageFailure)
    assert isinstance(outputs[1][-1].error, InvalidRequest)
    assert [output.last for output in outputs[2]] == [False, True]


def test_a_failure_meant_for_another_stage_passes_through(echo: Callable[..., Any]) -> None:
    driver = echo()
    driver.start(1)
    data = {"echo": {"stage": "other", "raise": "feed", "exit": 1}}
    driver.feed(1, data, last=True)
    assert driver.run()[1][0].data == data


def test_a_chunk_can_hang_step(echo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    driver = echo()
    driver.start(1)
    driver.feed(1, {"echo": {"hang": True}})
    slept: list[float] = []

    class Enough(Exception):
        pass

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 100:
            raise Enough

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(Enough):
        driver.step()
    driver.abort(1)


def test_a_chunk_can_end_the_process_after_a_line_on_stderr() -> None:
    script = f"""
from {EchoEngine.__module__} import EchoEngine
from omni_actors.stages.base import Chunk, StageContext, StageRequest
engine = EchoEngine(StageContext("echo", None, {{}}, 1, "cpu", print))
engine.start(StageRequest(1, ("client",), {{}}))
engine.feed(1, Chunk("client", 0, True, {{}}, {{"echo": {{"stderr": "last line", "exit": 7}}}}))
list(engine.step())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (7, "last line\n")


def test_steps_of_an_output_are_not_repeated_behind_a_checkpoint(echo: Callable[..., Any]) -> None:
    def begun(**resumed: Any) -> Any:
        driver = echo(steps=3)
        driver.start(1, **resumed)
        for n in range(2):
            driver.feed(1, {"n": n}, last=n == 1)
        return driver

    def outputs_of_steps(driver: Any) -> list[list[int]]:
        return [[output.data["n"] for output in driver.step()] for _ in iter(lambda: driver.engine.busy, False)]

    dead = begun()
    assert [len(dead.step()) for _ in range(4)] == [0, 0, 1, 0]
    dead.abort(1)
    assert outputs_of_steps(begun()) == [[], [], [0], [], [], [1]]
    assert outputs_of_steps(begun(checkpoint=dead.checkpoints[1])) == [[0], [], [1]]


def test_a_checkpoint_of_another_request_is_noticed(echo: Callable[..., Any]) -> None:
    dead = echo(steps=2)
    dead.start(1)
    dead.feed(1, last=True)
    dead.step()
    dead.abort(1)
    with pytest.raises(RuntimeError, match="corrupt checkpoint of request 2 after 1 steps"):
        echo(steps=2).start(2, checkpoint=msgspec.structs.replace(dead.checkpoints[1], request_id=2))
